"""Runs a model in a few batch shapes, all compiled before the first request.

`Runner.run` picks shapes that suit many texts and would compile while a client waits. Here a batch has 1, 2,
4, 8 or 16 rows, and a length of 16, 32, 64, ... tokens up to the model's maximum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx

from jaxir.core.platforms import local_devices
from jaxir.retrieval.encoding.batch_runner import Function, Runner
from jaxir.retrieval.encoding.batching import Batch, fill
from jaxir.runtime.partitioning import MeshConfig

ROWS = (1, 2, 4, 8, 16)  # possible numbers of rows in a batch
SHORTEST = 16  # tokens; the smallest length of a batch
# Padding tokens that take as long as one more batch. A CPU is limited by tokens, an accelerator by batches.
CALL_TOKENS = {"cpu": 16}
ACCELERATOR_CALL_TOKENS = 32_768


class FewShapes:
    """Runs functions of a model on small batches of token ids, on this process's first device."""

    def __init__(self, model: nnx.Module):
        self.compiled: set[tuple[Function, int, int]] = set()  # (function, rows, length)
        self._runner = Runner(model, MeshConfig().build(local_devices()[:1]))
        self._batch_tokens = self._runner.batch_tokens
        self._call_tokens = CALL_TOKENS.get(jax.default_backend(), ACCELERATOR_CALL_TOKENS)

    def shapes(self, max_length: int) -> list[tuple[int, int]]:
        """Returns all shapes (rows, length) for texts of up to `max_length` tokens."""
        shapes = itertools.product(ROWS, lengths_up_to(max_length))
        return [s for s in shapes if s[0] == 1 or s[0] * s[1] <= self._batch_tokens]

    def compile(self, function: Function, max_length: int, *, columns: int = 1) -> None:
        """Compiles and runs a function of `columns` arrays for each new shape, two shapes at a time."""
        with ThreadPoolExecutor(2, thread_name_prefix="compiler") as pool:
            runs = [
                pool.submit(self._call, function, [np.ones(shape, np.int32)] * columns)
                for shape in self.shapes(max_length)
                if (function, *shape) not in self.compiled
            ]
            for run in runs:
                run.result()

    def run(
        self,
        function: Function,
        *columns: Sequence[np.ndarray],
        max_length: int,
        of: tuple[int, ...] = (),
    ) -> np.ndarray:
        """Returns float32 [N, *of] for N rows of token ids, equal to `Runner.run` up to rounding."""
        results = np.empty([len(columns[0]), *of], np.float32)
        plan = lay_out(
            [len(row) for row in columns[0]],
            lengths=lengths_up_to(max_length),
            batch_tokens=self._batch_tokens,
            call_tokens=self._call_tokens,
        )
        for rows, length, chosen in plan:
            arrays = [fill(column, Batch(np.array(chosen), rows, length)) for column in columns]
            arrays[0][len(chosen) :, 0] = 1  # a padding row gets one token, so that no row is empty
            results[chosen] = self._call(function, arrays)[: len(chosen)]
        return results

    def _call(self, function: Function, arrays: Sequence[np.ndarray]) -> np.ndarray:
        result = self._runner.call(function, *arrays)
        self.compiled.add((function, *arrays[0].shape))
        return result


def lengths_up_to(max_length: int) -> list[int]:
    """Returns the lengths that a batch can have, in tokens: 16, 32, 64, ... and `max_length`."""
    lengths = [max_length]
    while lengths[0] > SHORTEST:
        lengths.insert(0, 1 << ((lengths[0] - 1).bit_length() - 1))
    return lengths


def lay_out(
    token_counts: Sequence[int], *, lengths: Sequence[int], batch_tokens: int, call_tokens: int
) -> list[tuple[int, int, list[int]]]:
    """Returns batches (rows, length in tokens, positions of texts) for N texts with these token counts.

    `rows` is one of `ROWS`. It may exceed the number of texts, if at most `call_tokens` padding tokens save
    a batch. A batch of several rows has at most `batch_tokens` tokens.
    """
    texts_of: dict[int, list[int]] = {}
    for text, count in enumerate(token_counts):
        texts_of.setdefault(next(length for length in lengths if length >= count), []).append(text)
    plan = []
    for length, texts in texts_of.items():
        allowed = [rows for rows in ROWS if rows == 1 or rows * length <= batch_tokens]
        while texts:
            rows = max(r for r in allowed if r <= len(texts))
            wider = next((r for r in allowed if r > len(texts)), None)
            if rows < len(texts) and wider and (wider - len(texts)) * length <= call_tokens:
                rows = wider
            plan.append((rows, length, texts[:rows]))
            texts = texts[rows:]
    return plan
