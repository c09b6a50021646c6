"""The XLA engine: one program for all devices, compiled through JAX."""
