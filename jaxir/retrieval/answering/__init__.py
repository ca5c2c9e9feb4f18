"""Answers questions from retrieved passages, with a reader (Fusion-in-Decoder)."""
