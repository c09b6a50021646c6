"""Weights of other frameworks: a reader for each format, and which layer of a file is which of a model."""
