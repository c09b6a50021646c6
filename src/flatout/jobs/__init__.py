"""The built-in jobs, one TOML recipe each."""
