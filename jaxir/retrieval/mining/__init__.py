"""Hard negatives for training."""
