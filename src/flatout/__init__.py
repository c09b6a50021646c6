"""Train image classifiers flat out on whatever accelerators you have."""

__version__ = "0.1.0"
