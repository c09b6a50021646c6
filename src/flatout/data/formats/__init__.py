"""One file for each data format."""
