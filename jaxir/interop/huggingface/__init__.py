"""Reads and writes folders of transformers and sentence-transformers."""
