"""Estimate speed and memory on devices that are not there."""
