"""Utilities of all packages."""
