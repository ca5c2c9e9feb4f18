"""SEED: what its decoder sees, its loss, and that it learns."""
