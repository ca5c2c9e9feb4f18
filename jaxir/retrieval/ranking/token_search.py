"""Finds the best passages of each query by MaxSim, comparing all of them, on this process's device."""

from __future__ import annotations

import jax
import numpy as np

from jaxir.losses._types import TokenVectors
from jaxir.losses.maxsim import maxsim

_QUERIES, _PASSAGES = 64, 512  # texts that are compared at once


def best_passages(queries: TokenVectors, passages: TokenVectors, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores and the rows of the `k` best passages of each query, best first, both [Q, k].

    The arrays are those of NumPy: `queries` [Q, Lq, D] and `passages` [P, Lp, D]. Of passages with equal
    scores the first is the better one.
    """
    total = len(passages.mask)
    found = (
        np.zeros((len(queries.mask), min(k, total)), np.float32),
        np.zeros((len(queries.mask), min(k, total)), int),
    )
    for start in range(0, len(queries.mask), _QUERIES):
        of_queries = _block(queries, start, _QUERIES)
        parts = [
            _compared(*of_queries, *_block(passages, at, _PASSAGES)) for at in range(0, total, _PASSAGES)
        ]
        scores = np.concatenate([np.asarray(part) for part in parts], axis=1)[:, :total]
        scores = scores[: len(queries.mask) - start]
        if queries.weight is not None:
            scores = scores * queries.weight[start : start + len(scores), None]
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        for whole, part in zip(found, (np.take_along_axis(scores, rows, axis=1), rows), strict=True):
            whole[start : start + len(part)] = part
    return found


_compared = jax.jit(maxsim)


def _block(texts: TokenVectors, start: int, size: int) -> list[np.ndarray]:
    """Returns vectors and mask of `size` texts; texts without tokens fill the last block."""
    parts = (x[start : start + size] for x in texts[:2])
    return [np.pad(x, [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)]) for x in parts]
