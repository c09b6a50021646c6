"""A local web page over all runs in a folder. It reads their files, and writes nothing."""
