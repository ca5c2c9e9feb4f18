"""A run's best documents read again with their query by a cross-encoder (Nogueira & Cho 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxir.data.sources import BeirFolder
from jaxir.errors import UserError
from jaxir.retrieval.ranking.runs import Run, rank


class Scorer(Protocol):
    """What is asked of a cross-encoder: float32 scores [N] of N (query, passage) pairs."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray: ...


def rerank(candidates: Run, folder: BeirFolder, scorer: Scorer, *, depth: int) -> Run:
    """Returns a run over the `depth` best documents of each query of `candidates`, scored by a cross-encoder.

    The texts of these documents are held, not the corpus.

    Args:
      candidates: the run that found the documents.
      folder: queries and documents.
      scorer: the cross-encoder.
      depth: documents of a query.

    Raises:
      UserError: `folder` lacks a query or a document of the run.
    """
    queries = {query.id: query.text for query in folder.queries() if query.id in candidates}
    if lacking := candidates.keys() - queries.keys():
        raise UserError(f"{folder.queries_path}: it lacks {min(lacking)!r}, a query of the run")
    wanted = {query_id: rank(answers)[:depth] for query_id, answers in candidates.items()}
    named = set().union(*wanted.values())
    texts = {d.id: d.contents for d in folder.documents_again("reading candidates") if d.id in named}
    if lacking := named - texts.keys():
        raise UserError(f"{folder.corpus_path}: it lacks {min(lacking)!r}, which the run has found")
    pairs = [(queries[query_id], texts[d]) for query_id, found in wanted.items() for d in found]
    scores = iter(scorer.score(pairs))
    return {query_id: {d: next(scores) for d in found} for query_id, found in wanted.items()}
