"""Training: from a recipe and data to a run folder. `run.py` is the whole run as one script."""
