"""What a data set holds, what a job will cost, what limits it, and how runs compare: everything around training."""
