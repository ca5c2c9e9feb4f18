"""Mines hard negatives for training."""
