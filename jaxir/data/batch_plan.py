"""Which part of a batch is a process's, and which items of lists go into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxir.data.text_table import TextTable
from jaxir.errors import UserError
from jaxir.features import Features, Key, Tokens

Batch = dict[str, np.ndarray]


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


class Drawn(NamedTuple):
    """The examples of a step.

    Attributes:
      step: the step.
      epoch: its epoch.
      examples: [b], those of this process.
      first: the place of the first of them in the whole batch.
    """

    step: int
    epoch: int
    examples: np.ndarray
    first: int


def draw(
    num_examples: int,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Drawn]:
    """Yields the examples of each step without end, from `start_step` on: a pure function of (seed, step).

    Args are those of `ArrayDataset.batches`.

    Raises:
      UserError: a negative seed, fewer examples than `batch_size`, or it does not divide by `process_count`.
    """
    if seed < 0:
        raise UserError(f"seed must be 0 or more, got {seed}")
    mine = share(batch_size, process_index, process_count)
    if batch_size > num_examples:
        raise UserError(
            f"batch_size is {batch_size:,}, but there are only {num_examples:,} pairs: give a smaller one"
        )

    def steps() -> Iterator[Drawn]:
        step, epoch, order = start_step, -1, np.empty(0, np.int64)
        steps_per_epoch = num_examples // batch_size
        while True:
            if step // steps_per_epoch != epoch:
                epoch = step // steps_per_epoch
                order = np.random.default_rng([seed, epoch]).permutation(num_examples)
            start = step % steps_per_epoch * batch_size
            yield Drawn(step, epoch, order[start : start + batch_size][mine], mine.start)
            step += 1

    return steps()


def in_one_order(num_examples: int, count: int | None = None) -> np.ndarray:
    """Returns `count` examples, or all, each once and shuffled: as the first epoch of seed 0 has them."""
    return np.random.default_rng([0, 0]).permutation(num_examples)[:count]


def choose(n: int, counts: np.ndarray, examples: np.ndarray, seed_and_epoch: tuple[int, int]) -> np.ndarray:
    """Returns int64 [b, `n`]: for each example, `n` of range(counts) at random, none twice, or cyclically."""
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


def uniforms(seed: int, *positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1) for int64 `positions`: random, and a function of (seed, position).

    Several arrays of them, broadcast against each other, say together what a position is.
    """
    state = _mix(np.full(1, seed, np.uint64))
    for part in positions:
        state = _mix(state + part.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def keys_of_twins(batch: Batch, features: Features) -> Batch:
    """Returns the batch with the key of the text that a text of a list should be unlike, where it is not.

    Losses leave out a negative with the key of its positive: once cut, two texts can be one to the model.

    Args:
      batch: arrays by feature.
      features: what it holds.
    """
    tokens = {f.field: name for name, f in features.items() if isinstance(f, Tokens)}
    keys = {f.field: name for name, f in features.items() if isinstance(f, Key)}
    found = dict(batch)
    for name, feature in features.items():
        if isinstance(feature, Tokens) and feature.unlike is not None and feature.field in keys:
            same = (batch[name] == batch[tokens[feature.unlike]][:, None]).all(-1, keepdims=True)
            key = keys[feature.field]
            found[key] = np.where(same, batch[keys[feature.unlike]][:, None], batch[key])
    return found


def without_twins(
    texts: TextTable, own: np.ndarray, items: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Leaves out each item with the tokens of its example's own text, unless all of the example's are such.

    Args:
      texts: the texts.
      own: [P], the text of each example that its items should be unlike.
      items: [K], as in `ArrayDataset`.
      offsets: [P + 1], likewise.

    Returns:
      Which items to keep (bool [K]), the offsets of these, and how many examples have no items but such.
    """
    example = np.repeat(np.arange(len(own)), np.diff(offsets))
    starts, own_starts = texts.offsets[items], texts.offsets[own[example]]
    sizes = texts.offsets[items + 1] - starts
    same = sizes == texts.offsets[own[example] + 1] - own_starts
    for at in (sizes // 2, sizes // 4):  # leaves few that must be compared whole
        tokens = (texts.flat.take(begin + at, mode="clip") for begin in (starts, own_starts))
        same &= np.equal(*tokens)
    for i in np.flatnonzero(same):
        text, its_own = (texts.flat[start : start + sizes[i]] for start in (starts[i], own_starts[i]))
        same[i] = np.array_equal(text, its_own)
    counts = np.bincount(example[~same], minlength=len(own))
    keep = ~same | (counts[example] == 0)
    left = np.concatenate([[0], np.cumsum(np.bincount(example[keep], minlength=len(own)))])
    return keep, left, int(np.sum((counts == 0) & (np.diff(offsets) > 0)))
