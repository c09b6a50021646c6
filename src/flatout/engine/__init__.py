"""Engines: the only place that knows devices."""
