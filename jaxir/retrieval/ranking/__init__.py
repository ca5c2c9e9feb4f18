"""Ranked lists: run files, fusion, rescoring and reranking."""
