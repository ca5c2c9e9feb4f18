"""Lucene through Pyserini's Anserini, in a separate process and environment."""
