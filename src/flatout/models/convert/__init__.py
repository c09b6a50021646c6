"""Weights of other frameworks: readers of formats, and the matching of a file's layers with a model's."""
