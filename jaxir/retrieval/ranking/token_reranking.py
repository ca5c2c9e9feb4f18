"""Reranks a run's best documents by MaxSim of their tokens, or by the three heads of a hybrid encoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxir.core.progress import progress
from jaxir.retrieval.ranking.run_reranking import Candidates
from jaxir.retrieval.ranking.runs import Run

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder

_DOCUMENTS = 4096  # documents whose vectors are held at once: 400 MB for 180 tokens of 128 dimensions


def rerank(candidates: Candidates, encoder: MultiVectorEncoder | HybridEncoder) -> Run:
    """Returns the run of the candidates with the encoder's similarities; a hybrid encoder's are "sum".

    Queries are taken in groups, and only the vectors of one group's documents are held at a time. A document
    of several groups is encoded for each of them.
    """
    scored: Run = {}
    with progress(total=len(candidates.found), what="reranking", unit="queries") as bar:
        for group in _groups(candidates):
            ids = list(dict.fromkeys(doc_id for query_id in group for doc_id in candidates.found[query_id]))
            places = {doc_id: place for place, doc_id in enumerate(ids)}
            passages = encoder.encode_passages([candidates.documents[i] for i in ids], show_progress=False)
            queries = encoder.encode_queries([candidates.queries[i] for i in group], show_progress=False)
            for number, query_id in enumerate(group):
                some = candidates.found[query_id]
                texts = _chosen(queries, [number]), _chosen(passages, [places[doc_id] for doc_id in some])
                scores = encoder.similarity(*texts)
                scores = scores["sum"] if isinstance(scores, dict) else scores
                scored[query_id] = dict(zip(some, scores[0].tolist(), strict=True))
                bar.update()
    return scored


def _chosen(texts: Any, numbers: list[int]) -> Any:
    """Returns the features of the texts at positions `numbers`, from a list of vectors or `HybridTexts`."""
    return [texts[i] for i in numbers] if isinstance(texts, list) else texts.chosen(numbers)


def _groups(candidates: Candidates) -> Iterator[list[str]]:
    """Yields lists of queries with at most `_DOCUMENTS` documents together; a larger query is alone."""
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
