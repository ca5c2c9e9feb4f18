"""A run's best documents read again with their query by a cross-encoder (Nogueira & Cho 2019)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.formats.sources import BeirFolder, read_wanted
from jaxir.retrieval.ranking.runs import Run, rank


class Scorer(Protocol):
    """What is asked of a cross-encoder: float32 scores [N] of N (query, passage) pairs."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray: ...


class Candidates(NamedTuple):
    """What is to be reranked.

    Attributes:
      found: of each query, the ids of its documents, best first.
      queries: texts of the queries by id.
      documents: texts of these documents by id.
    """

    found: dict[str, list[str]]
    queries: dict[str, str]
    documents: dict[str, str]


def read_candidates(run: Run, folder: BeirFolder, *, depth: int) -> Candidates:
    """Reads the texts of the `depth` best documents of each query of a run; the corpus is not held.

    Raises:
      UserError: `folder` lacks a query or a document of the run.
    """
    queries = texts_of_queries(folder, run, "is a query of the run")
    found = {query_id: rank(answers)[:depth] for query_id, answers in run.items()}
    named = set().union(*found.values())
    documents = read_wanted(folder.corpus_path, named, named_by="the run has found")
    return Candidates(found, queries, {document.id: document.contents for document in documents})


def texts_of_queries(folder: BeirFolder, wanted: Collection[str], why: str) -> dict[str, str]:
    """Returns the texts of some queries by id, in the order of their file.

    Raises:
      UserError: the folder lacks one, "which" `why`.
    """
    queries = {query.id: query.text for query in folder.queries() if query.id in wanted}
    if lacking := set(wanted) - queries.keys():
        raise UserError(f"{folder.queries_path}: it lacks {min(lacking)!r}, which {why}")
    return queries


def rerank(candidates: Candidates, scorer: Scorer) -> Run:
    """Returns a run over the candidates, scored by a cross-encoder."""
    found, queries, documents = candidates
    pairs = [(queries[query_id], documents[d]) for query_id, some in found.items() for d in some]
    scores = iter(scorer.score(pairs))
    return {query_id: {d: next(scores) for d in some} for query_id, some in found.items()}


def with_rest(scored: Run, run: Run) -> Run:
    """Returns what was scored, and below it what else the run found, in its order; each one less in score."""
    found = {}
    for query_id, of_query in scored.items():
        rest = [document for document in rank(run[query_id]) if document not in of_query]
        lowest = min(of_query.values())
        found[query_id] = {**of_query, **{d: lowest - n for n, d in enumerate(rest, 1)}}
    return found
