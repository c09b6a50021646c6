"""Weights of other frameworks, read without them: a file for each format, and how layers become those of a model."""
