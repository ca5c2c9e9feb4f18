"""Folders of Hugging Face and sentence-transformers."""
