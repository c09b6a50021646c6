"""Processes and hosts: starting them, watching them, adding up between them."""
