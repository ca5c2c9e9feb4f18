"""Makes an exact index of vectors in memory, dense or sparse."""

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from jaxir.retrieval.indexes.base_index import Index
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.index_info import Similarity
from jaxir.retrieval.indexes.sparse_index import SparseIndex


def index_of(vectors: np.ndarray | sparse.csr_matrix, ids: Sequence[str], *, similarity: Similarity) -> Index:
    """Returns an `ExactIndex` of vectors [N, D], or a `SparseIndex` of a sparse matrix [N, V]."""
    if sparse.issparse(vectors):
        return SparseIndex.build(vectors, ids)
    return ExactIndex.build([vectors], ids, similarity=similarity)
