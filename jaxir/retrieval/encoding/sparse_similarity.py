"""Compares sparse vectors by the similarities of sentence-transformers."""

import numpy as np
from scipy import sparse

from jaxir.core.errors import UserError
from jaxir.models.sparse_config import Score

SEARCHED = ("dot", "cosine")  # similarities that an index can compute as products of vectors


def similarities(
    a: sparse.csr_matrix, b: sparse.csr_matrix, *, score: Score, pairwise: bool = False
) -> np.ndarray:
    """Compares vectors by products, cosines, or negative distances (euclidean, manhattan).

    Args:
      a: vectors [A, V].
      b: vectors [B, V].
      score: how vectors are compared.
      pairwise: compare `a[i]` with `b[i]` only.

    Returns:
      float32 [A, B]; with `pairwise` [A].

    Raises:
      ValueError: the vectors have different numbers of components.
    """
    a, b = (sparse.csr_matrix(vectors, dtype=np.float64) for vectors in (a, b))
    if a.shape[1] != b.shape[1] or (pairwise and a.shape[0] != b.shape[0]):
        raise ValueError(f"vectors of shapes {a.shape} and {b.shape} cannot be compared")
    if score == "manhattan":
        return _manhattan(a, b, pairwise).astype(np.float32)
    if score == "cosine":
        a, b = normalized(a), normalized(b)
    products = np.asarray(a.multiply(b).sum(1)).reshape(-1) if pairwise else (a @ b.T).toarray()
    if score == "euclidean":
        of_a, of_b = (np.asarray(x.multiply(x).sum(1)).reshape(-1) for x in (a, b))
        squares = (of_a if pairwise else of_a[:, None]) + of_b - 2.0 * products
        products = -np.sqrt(np.maximum(squares, 0.0))
    return products.astype(np.float32)


def normalized(vectors: sparse.csr_matrix) -> sparse.csr_matrix:
    """Divides each row of vectors [N, V] by its length; a row of zeros stays zero."""
    vectors = sparse.csr_matrix(vectors, copy=True)
    squares = np.asarray(vectors.multiply(vectors).sum(1)).reshape(-1)
    lengths = np.repeat(np.sqrt(squares), np.diff(vectors.indptr))
    vectors.data /= np.where(lengths > 0, lengths, 1.0).astype(vectors.dtype)
    return vectors


def check_searched(score: Score, what: str) -> None:
    """Raises a UserError if vectors of an encoder named `what` cannot be searched by their products."""
    if score not in SEARCHED:
        raise UserError(
            f"{what} compares vectors by {score} distance, and an inverted index only by dot or cosine:"
            " compare with `encoder.similarity`"
        )


def _manhattan(a: sparse.csr_matrix, b: sparse.csr_matrix, pairwise: bool) -> np.ndarray:
    if pairwise:
        return -np.asarray(abs(a - b).sum(1)).reshape(-1)
    sums, columns = np.asarray(abs(b).sum(1)).reshape(-1), b.tocsc()
    found = np.empty((a.shape[0], b.shape[0]))
    for i, row in enumerate(a):
        # Where `row` is 0, |a - b| is |b|. So correct the sum of |b| only at the components of `row`.
        others = columns[:, row.indices].toarray()
        found[i] = -(sums + (np.abs(others - row.data) - np.abs(others)).sum(1))
    return found
