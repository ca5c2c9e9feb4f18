"""Plans batches of few shapes with little padding.

Texts are sorted by their number of tokens, the longest first. A batch has the length of its longest text,
rounded up to a multiple of 8, and as many rows as the token budget allows at that length. Batches of one
length therefore share a compiled program. Only the last batch, which has the shortest texts, is partial. For
few texts, compiling another program takes longer than padding; `choose_lengths` minimises the sum of both
costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxir.data.text.tokenizer import pad_batch

LENGTH_STEP = 8  # lengths of batches are multiples of this, in tokens


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of a plan.

    Attributes:
      texts: [n] positions of the batch's texts among all texts, longest first.
      rows: number of rows of the array, at least n; further rows are padding.
      length: number of tokens per row.
    """

    texts: np.ndarray
    rows: int
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.length


def plan_batches(
    token_counts: Sequence[int] | np.ndarray,
    *,
    batch_tokens: int,
    shape_cost: int = 0,
    row_multiple: int = 1,
    max_rows: int | None = None,
) -> list[Batch]:
    """Returns batches that hold each text once, longest first; deterministic.

    Args:
      token_counts: [N] number of tokens per text.
      batch_tokens: maximum size, rows x length, of a batch on one device. A longer text gets a batch of one
        row.
      shape_cost: number of padding tokens that one more length must save; 0 allows every multiple of 8.
      row_multiple: number of devices that share a batch; `rows` is a multiple of it.
      max_rows: maximum number of texts per batch on one device; None: as many as `batch_tokens` allows.
    """
    counts = np.asarray(token_counts, np.int64)
    order = np.argsort(-counts, kind="stable")
    lengths = choose_lengths(counts, shape_cost)
    batches: list[Batch] = []
    start = 0
    while start < len(order):
        length = int(lengths[np.searchsorted(lengths, counts[order[start]])])
        rows = max(1, batch_tokens // length)
        full = row_multiple * (rows if max_rows is None else min(rows, max_rows))
        texts = order[start : start + full]
        batches.append(Batch(texts, _partial_rows(len(texts), full, row_multiple), length))
        start += full
    return batches


def choose_lengths(token_counts: np.ndarray, shape_cost: int) -> np.ndarray:
    """Returns ascending multiples of 8 that minimise padding tokens + `shape_cost` x number of lengths."""
    if not len(token_counts):
        return np.zeros([0], np.int64)
    steps = np.maximum(1, -(-np.asarray(token_counts) // LENGTH_STEP))
    texts_up_to = np.cumsum(np.bincount(steps))
    # best[i] is the least cost of all texts of at most i steps, if the longest batches have i steps.
    best = np.zeros(len(texts_up_to))
    previous = np.zeros(len(texts_up_to), np.int64)
    for i in range(1, len(texts_up_to)):
        costs = best[:i] + (texts_up_to[i] - texts_up_to[:i]) * i * LENGTH_STEP + shape_cost
        previous[i] = int(np.argmin(costs))
        best[i] = costs[previous[i]]
    chosen, i = [], len(texts_up_to) - 1
    while i > 0:
        chosen.append(i * LENGTH_STEP)
        i = int(previous[i])
    return np.array(chosen[::-1], np.int64)


def fill(tokens: Sequence[np.ndarray], batch: Batch) -> np.ndarray:
    ids = pad_batch([tokens[text] for text in batch.texts], batch.length)
    return np.pad(ids, [(0, batch.rows - len(ids)), (0, 0)])


@dataclasses.dataclass
class EncodingReport:
    """Counts of encoded texts, tokens without and with padding, batch shapes, and seconds of wall time."""

    texts: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    shapes: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    seconds: float = 0.0

    def add(self, batch: Batch, token_counts: np.ndarray) -> None:
        self.texts += len(batch.texts)
        self.real_tokens += int(token_counts[batch.texts].sum())
        self.padded_tokens += batch.rows * batch.length
        self.shapes.add(batch.shape)

    @property
    def padding_ratio(self) -> float:
        """Number of tokens with padding / number of tokens without; 1 is the best value."""
        return self.padded_tokens / max(1, self.real_tokens)

    def __str__(self) -> str:
        rate = self.texts / self.seconds if self.seconds else 0.0
        return (
            f"{self.texts} texts in {self.seconds:.1f} s ({rate:.1f} a second), "
            f"padded/real tokens {self.padding_ratio:.2f}, {len(self.shapes)} shapes compiled"
        )


def _partial_rows(count: int, full: int, row_multiple: int) -> int:
    """Returns the rows of a batch of `count` texts: a power of two x `row_multiple`, to have few shapes."""
    rows = row_multiple
    while rows < count:
        rows *= 2
    return min(rows, full)


def padded_tokens(vectors: Sequence[np.ndarray], batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns the padded vectors [rows, length, D] of a batch's texts, and a mask of the real tokens."""
    found = np.zeros([batch.rows, batch.length, vectors[0].shape[1]], np.float32)
    mask = np.zeros([batch.rows, batch.length], bool)
    for row, some in enumerate(vectors):
        found[row, : len(some)], mask[row, : len(some)] = some, True
    return found, mask
