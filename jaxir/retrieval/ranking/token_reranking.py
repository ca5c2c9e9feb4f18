"""Reranks a run's best documents with a multi-vector encoder, by MaxSim of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxir.core.progress import progress
from jaxir.retrieval.ranking.run_reranking import Candidates
from jaxir.retrieval.ranking.runs import Run

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder

_DOCUMENTS = 4096  # documents whose vectors are held at once: 400 MB for 180 tokens of 128 dimensions


def rerank(candidates: Candidates, encoder: MultiVectorEncoder) -> Run:
    """Returns the run of the candidates with the encoder's similarities.

    Vectors are not stored: those of the documents of some queries are held at a time. A document of several
    such groups of queries is encoded for each.
    """
    scored: Run = {}
    with progress(total=len(candidates.found), what="reranking", unit="queries") as bar:
        for group in _groups(candidates):
            ids = list(dict.fromkeys(doc_id for query_id in group for doc_id in candidates.found[query_id]))
            passages = [candidates.documents[doc_id] for doc_id in ids]
            vectors = dict(zip(ids, encoder.encode_passages(passages, show_progress=False), strict=True))
            queries = [candidates.queries[query_id] for query_id in group]
            of_queries = encoder.encode_queries(queries, show_progress=False)
            for query_id, of_query in zip(group, of_queries, strict=True):
                some = candidates.found[query_id]
                scores = encoder.similarity([of_query], [vectors[doc_id] for doc_id in some])[0]
                scored[query_id] = dict(zip(some, scores.tolist(), strict=True))
                bar.update()
    return scored


def _groups(candidates: Candidates) -> Iterator[list[str]]:
    """Yields lists of queries that have at most `_DOCUMENTS` documents together, or of one query."""
    group: list[str] = []
    documents: set[str] = set()
    for query_id, some in candidates.found.items():
        if group and len(documents.union(some)) > _DOCUMENTS:
            yield group
            group, documents = [], set()
        group.append(query_id)
        documents.update(some)
    if group:
        yield group
