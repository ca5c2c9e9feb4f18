"""What a batch of pairs holds, which part of it is a process's, and which negatives go into it."""

from __future__ import annotations

import numpy as np

from jaxir.data.text_table import TextTable
from jaxir.errors import UserError

Batch = dict[str, np.ndarray]


def features_of(query_length: int, passage_length: int, num_negatives: int) -> dict[str, tuple[int, ...]]:
    """Returns the features of a batch and the shape that one example has in each."""
    shapes: dict[str, tuple[int, ...]] = {"query_ids": (query_length,), "passage_ids": (passage_length,)}
    shapes |= {"query_key": (2,), "passage_key": (2,)}
    if num_negatives:
        shapes |= {"negative_ids": (num_negatives, passage_length), "negative_key": (num_negatives, 2)}
    return shapes


def share(batch_size: int, process_index: int, process_count: int) -> slice:
    """Returns the part of a batch that is process `process_index`'s.

    Raises:
      UserError: the batch does not divide by the number of processes.
    """
    if batch_size <= 0 or batch_size % process_count:
        raise UserError(
            f"batch_size must be a positive multiple of the {process_count} processes, got {batch_size}"
        )
    if not 0 <= process_index < process_count:
        raise ValueError(f"no process {process_index} among {process_count}")
    size = batch_size // process_count
    return slice(process_index * size, (process_index + 1) * size)


def choose(
    n: int, counts: np.ndarray, examples: np.ndarray, seed_and_epoch: tuple[int, int] | None
) -> np.ndarray:
    """Returns int64 [b, `n`]: for each example, `n` of range(counts) without repeats, or cyclically.

    With `seed_and_epoch` the choice is random, else the first come first.
    """
    if seed_and_epoch is None:
        return np.arange(n) % counts[:, None]
    candidates = np.arange(counts.max(initial=1), dtype=np.uint64)
    seed, epoch = (np.full(1, value, np.uint64) for value in seed_and_epoch)
    state = _mix(_mix(seed) + epoch)
    draws = _mix(_mix(state + examples.astype(np.uint64))[:, None] + candidates)
    draws[candidates >= counts[:, None].astype(np.uint64)] = np.iinfo(np.uint64).max
    order = np.argsort(draws, axis=1, kind="stable")
    return np.take_along_axis(order, np.arange(n) % counts[:, None], axis=1)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64: uint64 -> well mixed uint64, elementwise."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1) for int64 `positions`: random, and a function of (seed, position)."""
    state = _mix(_mix(np.full(1, seed, np.uint64)) + positions.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def negative_keys(negative_ids: np.ndarray, keys: np.ndarray, batch: Batch) -> np.ndarray:
    """Returns the keys of hard negatives, with the passage's key for one that has the passage's very tokens.

    Losses leave out a negative with the key of its positive: once cut, two texts can be one to the model.

    Args:
      negative_ids: [B, N, Lp].
      keys: [B, N, 2], of the whole texts.
      batch: has passage_ids [B, Lp] and passage_key [B, 2].
    """
    same = (negative_ids == batch["passage_ids"][:, None]).all(-1, keepdims=True)
    return np.where(same, batch["passage_key"][:, None], keys)


def without_positives(
    passages: TextTable, positives: np.ndarray, negatives: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Leaves out each negative with the tokens of its pair's passage, unless all of the pair's are such.

    Args:
      passages: the texts.
      positives: [P], the passage of each pair.
      negatives: [K], as in `PairDataset`.
      offsets: [P + 1], likewise.

    Returns:
      The negatives that are left, their offsets, and how many pairs have no negatives but such.
    """
    pair = np.repeat(np.arange(len(positives)), np.diff(offsets))
    starts, own_starts = passages.offsets[negatives], passages.offsets[positives[pair]]
    sizes = passages.offsets[negatives + 1] - starts
    same = sizes == passages.offsets[positives[pair] + 1] - own_starts
    for at in (sizes // 2, sizes // 4):  # leaves few that must be compared whole
        tokens = (passages.flat.take(begin + at, mode="clip") for begin in (starts, own_starts))
        same &= np.equal(*tokens)
    for i in np.flatnonzero(same):
        text, own = (passages.flat[start : start + sizes[i]] for start in (starts[i], own_starts[i]))
        same[i] = np.array_equal(text, own)
    counts = np.bincount(pair[~same], minlength=len(positives))
    keep = ~same | (counts[pair] == 0)
    left = np.concatenate([[0], np.cumsum(np.bincount(pair[keep], minlength=len(positives)))])
    return negatives[keep], left, int(np.sum((counts == 0) & (np.diff(offsets) > 0)))
