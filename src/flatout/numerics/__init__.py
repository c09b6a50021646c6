"""Pure numerics: no device, no state."""
