"""Decides which examples a step trains on: each epoch's order, each process's share, and list items."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Key, Tokens
from jaxir.data.batches.text_table import TextTable

Batch = dict[str, np.ndarray]
# Datasets with fewer examples hold the order of an epoch as an array (4 bytes per example, at most 0.5 GB).
SHUFFLED_BELOW = 1 << 27
_ROUNDS = 8  # number of rounds of the Feistel cipher in `_Permutation`


class StepExamples(NamedTuple):
    """This process's examples [b] at a step; `first` is the index of the first one in the global batch."""

    step: int
    epoch: int
    examples: np.ndarray
    first: int


class Batching(NamedTuple):
    """How batches are drawn; the fields are the arguments of `Dataset.batches`."""

    batch_size: int
    seed: int
    start_step: int = 0
    process_index: int = 0
    process_count: int = 1

    @property
    def share(self) -> slice:
        if self.batch_size <= 0 or self.batch_size % self.process_count:
            raise UserError(
                f"batch_size must be a positive multiple of the {self.process_count} processes, got"
                f" {self.batch_size}"
            )
        size = self.batch_size // self.process_count
        return slice(self.process_index * size, (self.process_index + 1) * size)


class Plan:
    """Maps a step to its examples: a pure function of (seed, step), safe to call from several threads.

    `noun` is the word for the examples in error messages.
    """

    def __init__(self, num_examples: int, how: Batching, *, noun: str = "pairs"):
        if how.seed < 0:
            raise UserError(f"seed must be 0 or more, got {how.seed}")
        self._mine = how.share
        if how.batch_size > num_examples:
            raise UserError(
                f"batch_size is {how.batch_size:,}, but there are only {num_examples:,} {noun}:"
                " give a smaller batch_size"
            )
        self._num_examples, self._how = num_examples, how
        self._orders: dict[int, np.ndarray | _Permutation] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[StepExamples]:
        return map(self, itertools.count(self._how.start_step))

    def __call__(self, step: int) -> StepExamples:
        epoch, place = divmod(step, self._num_examples // self._how.batch_size)
        start = place * self._how.batch_size
        whole = self._order(epoch)[start : start + self._how.batch_size]
        return StepExamples(step, epoch, whole[self._mine].astype(np.int64), self._mine.start)

    def _order(self, epoch: int) -> np.ndarray | _Permutation:
        with self._lock:
            if epoch not in self._orders:
                # Keep the previous epoch's order, which threads that read ahead may still need.
                self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
                self._orders[epoch] = order_of(self._num_examples, self._how.seed, epoch)
            return self._orders[epoch]


def order_of(num_examples: int, seed: int, epoch: int) -> np.ndarray | _Permutation:
    """Returns the order of an epoch; a slice of the order is an array [n] of example numbers."""
    if num_examples >= SHUFFLED_BELOW:
        return _Permutation(num_examples, seed, epoch)
    order = np.arange(num_examples, dtype=np.uint32)
    np.random.default_rng([seed, epoch]).shuffle(order)
    return order


class _Permutation:
    """A random permutation of range(`size`), computed on access by a Feistel cipher of the positions.

    The cipher permutes numbers with an even number of bits. Results beyond `size` are encrypted again (Black
    and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). The round function is SplitMix64 of one half.
    """

    def __init__(self, size: int, seed: int, epoch: int):
        self._size, self._half = size, np.uint64(-(-(size - 1).bit_length() // 2))
        state = _mix(_mix(np.full(1, seed, np.uint64)) + np.uint64(epoch))
        self._keys = _mix(state + np.arange(_ROUNDS, dtype=np.uint64))

    def __getitem__(self, places: slice) -> np.ndarray:
        found = np.arange(*places.indices(self._size), dtype=np.uint64)
        beyond = np.ones(len(found), bool)
        while beyond.any():
            found[beyond] = self._once(found[beyond])
            beyond = found >= self._size
        return found

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = numbers >> self._half, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self._half | right


def in_one_order(num_examples: int, count: int | None = None) -> np.ndarray:
    """Returns the numbers of the first `count` examples (None: all) in the order of epoch 0 of seed 0."""
    return order_of(num_examples, 0, 0)[:count].astype(np.int64)


def choose(
    n: int,
    counts: np.ndarray,
    examples: np.ndarray,
    seed_and_epoch: tuple[int, int],
    *,
    in_order: bool = False,
) -> np.ndarray:
    """Returns int64 [b, `n`]: for each example, `n` distinct random indices into its list of `counts` items.

    A list with fewer than `n` items is repeated cyclically. With `in_order`, the indices are ascending.
    """
    candidates = np.arange(counts.max(initial=1), dtype=np.uint64)
    seed, epoch = (np.full(1, value, np.uint64) for value in seed_and_epoch)
    state = _mix(_mix(seed) + epoch)
    draws = _mix(_mix(state + examples.astype(np.uint64))[:, None] + candidates)
    draws[candidates >= counts[:, None].astype(np.uint64)] = np.iinfo(np.uint64).max
    order = np.argsort(draws, axis=1, kind="stable")
    repeated = np.arange(n) % counts[:, None]
    chosen = np.take_along_axis(order, repeated, axis=1)
    return np.where(counts[:, None] < n, repeated, np.sort(chosen, axis=1)) if in_order else chosen


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies the hash function SplitMix64 to uint64 numbers, elementwise."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, *positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1): a hash of the seed and the int64 positions, which are broadcast together."""
    state = _mix(np.full(1, seed, np.uint64))
    for part in positions:
        state = _mix(state + part.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mark_duplicates(batch: Batch, features: Features) -> Batch:
    """Gives a list text the key of its `unlike` text if both have the same tokens.

    Different texts can have equal tokens after truncation. Losses ignore a negative with its positive's key.
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


def drop_duplicates(
    texts: TextTable, own: np.ndarray, items: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Drops each list item that has the same tokens as its example's own text, unless no item would remain.

    Args:
      texts: the tokens of all texts; `own` and `items` are rows of this table.
      own: [P], for each example the text that its items must differ from.
      items: [K], the list items of all examples, one example after the other.
      offsets: [P + 1]; the items of example p are items[offsets[p]:offsets[p + 1]].

    Returns:
      Which items to keep (bool [K]), their offsets, and the number of examples whose items all equal `own`.
    """
    example = np.repeat(np.arange(len(own)), np.diff(offsets))
    starts, own_starts = texts.offsets[items], texts.offsets[own[example]]
    sizes = texts.offsets[items + 1] - starts
    same = sizes == texts.offsets[own[example] + 1] - own_starts
    # Compare a token in the middle of each text first, so that few texts are compared in full.
    for at in (sizes // 2, sizes // 4):
        tokens = (texts.flat.take(begin + at, mode="clip") for begin in (starts, own_starts))
        same &= np.equal(*tokens)
    for i in np.flatnonzero(same):
        text, its_own = (texts.flat[start : start + sizes[i]] for start in (starts[i], own_starts[i]))
        same[i] = np.array_equal(text, its_own)
    counts = np.bincount(example[~same], minlength=len(own))
    keep = ~same | (counts[example] == 0)
    left = np.concatenate([[0], np.cumsum(np.bincount(example[keep], minlength=len(own)))])
    return keep, left, int(np.sum((counts == 0) & (np.diff(offsets) > 0)))
