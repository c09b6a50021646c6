"""Throughput against the number of devices."""
