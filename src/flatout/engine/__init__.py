"""Engines: the only device-specific code."""
