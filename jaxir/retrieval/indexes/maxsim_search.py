"""Finds each query's best passages by MaxSim with every passage, on all devices of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxir.core.platforms import local_devices
from jaxir.losses.maxsim import maxsim
from jaxir.retrieval.encoding.batching import padded_tokens, plan_batches

_BLOCK_TOKENS = 65_536  # tokens of passages that a device compares with all queries at once
_QUERY_TOKENS = 4096

Best = tuple[np.ndarray, np.ndarray]  # rows of passages, best first, and their scores


def best_of_all(
    queries: Sequence[np.ndarray],
    lengths: np.ndarray,
    vectors_of: Callable[[int], np.ndarray],
    k: int,
    *,
    rank: np.ndarray,
) -> list[Best]:
    """Compares every passage that has tokens with every query.

    Args:
      queries: Q arrays [tokens, D]; a query without tokens finds nothing.
      lengths: the numbers of tokens of P passages, [P].
      vectors_of: returns the vectors [tokens, D] of a passage, given its row.
      k: number of passages per query.
      rank: [P]; the passage with the smallest rank is first among equal scores.

    Returns:
      for each query the rows of at most k passages and their scores.
    """
    devices = local_devices()
    best = [(np.empty(0, np.int64), np.empty(0, np.float32)) for _ in queries]
    asked = [number for number, query in enumerate(queries) if len(query)]
    sizes = {"batch_tokens": _QUERY_TOKENS, "shape_cost": _QUERY_TOKENS}
    parts = plan_batches([len(queries[n]) for n in asked], **sizes)
    numbers = [[asked[i] for i in part.texts] for part in parts]
    placed = [
        [jax.device_put(padded_tokens([queries[n] for n in some], part), device) for device in devices]
        for some, part in zip(numbers, parts, strict=True)
    ]
    in_flight: list[tuple[np.ndarray, list[jax.Array]]] = []

    def take() -> None:
        rows, of_parts = in_flight.pop(0)
        for some, found in zip(numbers, of_parts, strict=True):
            for n, scores in zip(some, np.asarray(found), strict=False):
                every = np.concatenate([best[n][0], rows]), np.concatenate([best[n][1], scores[: len(rows)]])
                best[n] = first_of(*every, k, rank)

    for turn, (rows, block) in enumerate(_blocks(lengths, vectors_of)):
        device = turn % len(devices)
        block = jax.device_put(block, devices[device])
        in_flight.append((rows, [_compared(*part[device], *block) for part in placed]))
        if len(in_flight) > 2 * len(devices):
            take()
    while in_flight:
        take()
    return best


def first_of(rows: np.ndarray, scores: np.ndarray, k: int, rank: np.ndarray) -> Best:
    """Returns the k rows with the largest scores, best first; equal scores are in ascending order of rank."""
    order = np.lexsort((rank[rows], -scores))[:k]
    return rows[order], scores[order]


def descending(ids: Sequence[str]) -> np.ndarray:
    """Returns the rank of each id in descending order, the order of equal scores in trec_eval."""
    rank = np.empty(len(ids), np.int64)
    rank[sorted(range(len(ids)), key=ids.__getitem__, reverse=True)] = np.arange(len(ids))
    return rank


def _blocks(
    lengths: np.ndarray, vectors_of: Callable[[int], np.ndarray]
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Yields the rows of passages that have tokens, and their padded vectors and mask."""
    full = np.flatnonzero(lengths)
    for batch in plan_batches(lengths[full], batch_tokens=_BLOCK_TOKENS, shape_cost=_BLOCK_TOKENS):
        rows = full[batch.texts]
        yield rows, padded_tokens([vectors_of(row) for row in rows], batch)


_compared = jax.jit(maxsim)
