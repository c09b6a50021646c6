"""What every layer needs."""
