"""Readers of data, one module for a family of formats."""
