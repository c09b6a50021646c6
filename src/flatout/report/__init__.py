"""Pictures and pages about the results of a run."""
