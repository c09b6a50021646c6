"""Finished runs: load, predict, evaluate, explain, export, publish."""
