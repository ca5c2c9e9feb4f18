"""Scores the documents of a run with the exact vectors of a dual encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.retrieval.encoding.lengths import UnusableVectorError, first_unusable
from jaxir.retrieval.encoding.stored_embeddings import StoredEmbeddings
from jaxir.retrieval.indexes.base_index import normalize
from jaxir.retrieval.ranking.runs import Run, rank
from jaxir.storage.npy import gather

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.text_encoder import DualEncoder

QUERY_BLOCK = 1024  # queries encoded at a time


def score_candidates(
    candidates: Run,
    *,
    queries: Mapping[str, str],
    embeddings: StoredEmbeddings,
    encoder: DualEncoder,
    depth: int,
) -> Run:
    """Returns a run over the `depth` best documents of each query of `candidates`, scored by a dual encoder.

    Unlike a dense run, the result has a score for every candidate. Only vectors of candidates are read. A
    document with several vectors (corpus expansion) has the score of the best one. `queries` has texts by id.
    """
    info = embeddings.info
    embeddings.require_model(encoder)
    if lacking := [query_id for query_id in candidates if query_id not in queries]:
        raise UserError(
            f"--queries lacks query {lacking[0]!r} of the run ({len(lacking)} are missing): give the file"
            " that was searched with"
        )
    wanted = {query_id: rank(answers)[:depth] for query_id, answers in candidates.items()}
    rows: dict[str, list[int]] = {doc_id: [] for doc_ids in wanted.values() for doc_id in doc_ids}
    for row, doc_id in enumerate(embeddings.ids):
        if doc_id in rows:
            rows[doc_id].append(row)
    for query_id, doc_ids in wanted.items():
        if unknown := [doc_id for doc_id in doc_ids if not rows[doc_id]]:
            raise UserError(
                f"--embeddings lacks document {unknown[0]!r}, found for query {query_id!r}: give the"
                " embeddings of the corpus that was searched"
            )
    names, scored = list(wanted), {}
    with progress(total=len(names), what="rescoring", unit="queries") as bar:
        for start in range(0, len(names), QUERY_BLOCK):
            block = names[start : start + QUERY_BLOCK]
            vectors = encoder.encode_queries([queries[query_id] for query_id in block])
            for query_id, vector in zip(block, _comparable(vectors, info.similarity), strict=True):
                doc_ids = wanted[query_id]
                counts = np.array([len(rows[doc_id]) for doc_id in doc_ids], np.int64)
                found = gather(embeddings.shards, np.array([r for d in doc_ids for r in rows[d]], np.int64))
                if (unusable := first_unusable(found)) is not None:
                    row, reason = unusable
                    doc_id = doc_ids[int(np.searchsorted(np.cumsum(counts), row, side="right"))]
                    raise UnusableVectorError(f"the vector of {doc_id!r}", row, reason)
                scores = _comparable(found, info.similarity) @ vector
                scores = np.maximum.reduceat(scores, np.cumsum(counts) - counts)
                scored[query_id] = dict(zip(doc_ids, scores.tolist(), strict=True))
                bar.update()
    return scored


def _comparable(vectors: np.ndarray, similarity: str) -> np.ndarray:
    return normalize(vectors) if similarity == "cosine" else vectors
