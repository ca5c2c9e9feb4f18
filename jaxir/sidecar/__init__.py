"""The sidecar: a separate process, with its own environment, that runs Lucene by Pyserini's Anserini."""
