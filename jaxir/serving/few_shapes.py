"""A model's programs in a few shapes, all of which can be compiled before the first client comes.

`Runner.run` picks the shapes that suit many texts; it would compile while a client waits. Here lengths are
16, 32, 64 ... up to the maximum and rows 1, 2, 4, 8, 16, whatever the texts are.
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

ROWS = (1, 2, 4, 8, 16)
SHORTEST = 16
# Padded tokens that one batch less is worth: on a CPU time goes by tokens, on an accelerator by batches.
CALL_TOKENS = {"cpu": 16}
ACCELERATOR_CALL_TOKENS = 32_768


class FewShapes:
    """Runs functions of a model over small numbers of rows of tokens, on the first device of this process.

    Args:
      model: the module.

    Attributes:
      compiled: the programs that there are: (function, rows, length).
    """

    def __init__(self, model: nnx.Module):
        self.compiled: set[tuple[Function, int, int]] = set()
        self._runner = Runner(model, MeshConfig().build(local_devices()[:1]))
        self._batch_tokens = self._runner.batch_tokens
        self._call_tokens = CALL_TOKENS.get(jax.default_backend(), ACCELERATOR_CALL_TOKENS)

    def shapes(self, max_length: int) -> list[tuple[int, int]]:
        """Returns the shapes (rows, length) that rows of up to `max_length` tokens are laid out in."""
        shapes = itertools.product(ROWS, lengths_up_to(max_length))
        return [s for s in shapes if s[0] == 1 or s[0] * s[1] <= self._batch_tokens]

    def compile(self, function: Function, max_length: int, *, columns: int = 1) -> None:
        """Compiles and runs all new shapes of a function of so many arrays, two at a time."""
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
        """Returns float32 [N, *of] of N rows, to rounding what `Runner.run` gives."""
        results = np.empty([len(columns[0]), *of], np.float32)
        plan = lay_out(
            [len(row) for row in columns[0]],
            lengths=lengths_up_to(max_length),
            batch_tokens=self._batch_tokens,
            call_tokens=self._call_tokens,
        )
        for rows, length, chosen in plan:
            arrays = [fill(column, Batch(np.array(chosen), rows, length)) for column in columns]
            arrays[0][len(chosen) :, 0] = 1  # no row is empty
            results[chosen] = self._call(function, arrays)[: len(chosen)]
        return results

    def _call(self, function: Function, arrays: Sequence[np.ndarray]) -> np.ndarray:
        result = self._runner.call(function, *arrays)
        self.compiled.add((function, *arrays[0].shape))
        return result


def lengths_up_to(max_length: int) -> list[int]:
    """Returns 16, 32, 64 ... and `max_length`, ascending."""
    lengths = [max_length]
    while lengths[0] > SHORTEST:
        lengths.insert(0, 1 << ((lengths[0] - 1).bit_length() - 1))
    return lengths


def lay_out(
    token_counts: Sequence[int], *, lengths: Sequence[int], batch_tokens: int, call_tokens: int
) -> list[tuple[int, int, list[int]]]:
    """Lays N texts out in batches of few shapes.

    Args:
      token_counts: [N] tokens of each text, at most `lengths[-1]`.
      lengths: the lengths of batches, ascending.
      batch_tokens: the most tokens of a batch that has more than one row.
      call_tokens: how many padded tokens one batch less is worth.

    Returns:
      (rows, length, texts) of each batch: rows is one of `ROWS`, at least as many as it has texts.
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
