"""Folders of Hugging Face and sentence-transformers, the hub, and the formats of their weights."""
