"""Lucene, by way of Pyserini's Anserini, in a process and an environment of its own."""
