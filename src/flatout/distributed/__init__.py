"""Processes and hosts: launching, monitoring, and collective operations."""
