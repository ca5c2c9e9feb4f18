"""Makes an exact index in memory, from dense vectors, sparse vectors or vectors of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import sparse

from jaxir.retrieval.encoding.sparse_similarity import check_searched
from jaxir.retrieval.indexes.base_index import Index
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.maxsim_search import best_of_all, descending
from jaxir.retrieval.indexes.sparse_index import SparseIndex


def index_of(
    vectors: np.ndarray | sparse.csr_matrix | list[np.ndarray],
    ids: Sequence[str],
    *,
    similarity: Literal["cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim"],
) -> Index | TokensInMemory:
    """Returns an exact index; raises a UserError for sparse vectors that are compared by a distance.

    It is an `ExactIndex` of vectors [N, D], a `SparseIndex` of a sparse matrix [N, V], or `TokensInMemory` of
    a list of N arrays [tokens, D].
    """
    if isinstance(vectors, list):
        return TokensInMemory(vectors, ids, is_mean=similarity == "meanmaxsim")
    if sparse.issparse(vectors):
        check_searched(similarity, "the sparse encoder")
        return SparseIndex.build(vectors, ids, similarity=similarity)
    return ExactIndex.build([vectors], ids, similarity=similarity)


class TokensInMemory:
    """N passages with a vector for each token, all compared by MaxSim.

    Args:
      vectors: N arrays [tokens, D].
      ids: the passages' ids.
      is_mean: whether scores are divided by the number of the query's tokens.
    """

    def __init__(self, vectors: list[np.ndarray], ids: Sequence[str], *, is_mean: bool):
        self._vectors, self._ids, self._is_mean = vectors, list(ids), is_mean
        self._lengths = np.array([len(some) for some in vectors], np.int64)
        self._rank = descending(ids)

    def search(self, queries: Sequence[np.ndarray], k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, but for arrays [tokens, D]."""
        k = min(k, len(self._ids))
        scores, ids = np.full([len(queries), k], -np.inf, np.float32), []
        found = best_of_all(queries, self._lengths, self._vectors.__getitem__, k, rank=self._rank)
        for number, (rows, of_rows) in enumerate(found):
            scores[number, : len(rows)] = of_rows / (len(queries[number]) if self._is_mean else 1)
            ids.append([self._ids[row] for row in rows])
        return scores, ids
