"""Runs a model on texts that share rows (`models.packed`), so that ten programs take any texts.

A row has whole texts, up to `ROW` tokens, or one longer text and what fits beside it. Every row begins
with the oldest text that is left, and the largest texts that fit fill the row. So no text waits long, and 64
waiting texts fill rows to 97 %.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxir.models.packed import SHORTEST
from jaxir.retrieval.encoding.batch_runner import Function
from jaxir.serving.few_shapes import FIRST_LENGTH, FewShapes, Shape

ROW = 128  # tokens of a row, unless it has a longer text; longer rows take longer in attention
ALONE = (16, 32, 48, 64, 96)  # further lengths of a batch of one row, in tokens
# Maximum tokens of a batch. On a CPU, larger batches are not faster; each batch reads all weights once.
BATCH_TOKENS = 512
LOOK = 256  # number of waiting texts among which a batch is chosen


class Row(NamedTuple):
    """Texts that share a row: its length in tokens, the texts' numbers, and the tokens that these have."""

    length: int
    texts: list[int]
    tokens: int


class PackedShapes(FewShapes):
    """Like `FewShapes`, for functions of `tower_functions.PACKED`."""

    def shapes(self, max_length: int) -> list[Shape]:
        lengths = row_lengths(max_length)
        alone = [(1, length) for length in (*ALONE, *lengths)]
        return alone + [
            (rows, length) for length in lengths for rows in (2, 4) if rows * length <= BATCH_TOKENS
        ]

    def prepare(self, function: Function, max_length: int) -> None:
        """Compiles the two shapes that fit every text."""
        self._compile(function, [(1, FIRST_LENGTH), (1, row_lengths(max_length)[-1])], 2)

    def compile(self, function: Function, max_length: int, *, stop: threading.Event | None = None) -> None:
        super().compile(function, max_length, columns=2, stop=stop)

    def run(
        self, function: Function, tokens: Sequence[np.ndarray], *, max_length: int, of: tuple[int, ...]
    ) -> np.ndarray:
        """Returns float32 [N, *of] for N texts' token ids, equal to `Runner.run` up to rounding."""
        self.prepare(function, max_length)  # compiles only if the function is new
        results = np.empty([len(tokens), *of], np.float32)
        ready = [(rows, length) for compiled, rows, length in self.compiled if compiled is function]
        for length, rows in plan([len(ids) for ids in tokens], ready):
            ids, numbers = np.zeros([len(rows), length], np.int32), np.full([len(rows), length], -1, np.int32)
            order = [text for row in rows for text in row]
            number = iter(range(len(order)))
            for r, row in enumerate(rows):
                whole = [tokens[text] for text in row]
                filled = np.concatenate(whole)
                ids[r, : len(filled)] = filled
                numbers[r, : len(filled)] = np.repeat([next(number) for _ in row], [len(w) for w in whole])
            results[order] = self._runner.call(function, ids, numbers)[: len(order)]
        return results


def row_lengths(max_length: int) -> list[int]:
    """Returns the possible lengths of a row in tokens: `ROW`, 256, 512, ... up to `max_length`."""
    lengths = [ROW]
    while lengths[-1] < max_length:
        lengths.append(min(2 * lengths[-1], -(-max_length // 16) * 16))
    return lengths


def fill_rows(sizes: Sequence[int], lengths: Sequence[int], *, max_tokens: float = np.inf) -> list[Row]:
    """Returns rows that hold the first texts of N, each once; all texts without `max_tokens`.

    Args:
      sizes: the number of tokens of each text, the oldest first.
      lengths: the possible lengths of a row, ascending; the last one fits every text.
      max_tokens: no further row is begun if the rows then had more than this many tokens.
    """
    left, rows, total = list(range(len(sizes))), [], 0
    while left:
        length = next(length for length in lengths if length >= sizes[left[0]])
        if rows and total + length > max_tokens:
            break
        texts = [left.pop(0)]
        room = length - sizes[texts[0]]
        while len(texts) < length // SHORTEST:
            fit = max((n for n in left if sizes[n] <= room), key=lambda n: sizes[n], default=None)
            if fit is None:
                break
            left.remove(fit)
            texts.append(fit)
            room -= sizes[fit]
        rows.append(Row(length, texts, length - room))
        total += length
    return rows


def chosen(sizes: Sequence[int], idle: int, max_length: int) -> list[int]:
    """Returns which of the waiting texts form the next batch: at most `BATCH_TOKENS`, if no text is longer.

    If the waiting texts are few, they are split evenly among the `idle` threads.
    """
    sizes = sizes[:LOOK]
    share = -(-sum(sizes) // idle)
    lengths = row_lengths(max_length)
    rows = fill_rows(sizes, lengths, max_tokens=min(BATCH_TOKENS, max(share, 1)))
    return [text for row in rows for text in row.texts]


def plan(sizes: Sequence[int], shapes: Collection[Shape]) -> list[tuple[int, list[list[int]]]]:
    """Returns batches (length in tokens, the texts of each row) of some of `shapes` for N texts.

    One of `shapes` must have one row that is as long as the longest text, and at least `ROW` long.
    """
    alone = sorted(length for rows, length in shapes if rows == 1)
    batches = []
    filled = fill_rows(sizes, [length for length in alone if length >= ROW])
    for length in {row.length for row in filled}:
        rows = sorted((row for row in filled if row.length == length), key=lambda row: -row.tokens)
        while rows:
            count = max(n for n, each in shapes if each == length and n <= len(rows))
            taken, rows = rows[:count], rows[count:]
            most = length if count > 1 else next(n for n in alone if n >= taken[0].tokens)
            batches.append((most, [row.texts for row in taken]))
    return batches
