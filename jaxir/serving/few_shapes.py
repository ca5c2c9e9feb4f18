"""Runs a model in a few batch shapes, so that no client waits for a compilation.

`Runner.run` picks shapes that suit many texts and would compile while a client waits. Here a batch has 1, 2,
4, 8 or 16 rows and one of a few lengths. Two shapes, which fit every text, are compiled before the first
request. The others are compiled in the background; until then a text is padded to a shape that is ready.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx

from jaxir.core.platforms import local_devices
from jaxir.retrieval.encoding.batch_runner import RUNNERS, Function, Runner
from jaxir.retrieval.encoding.batching import Batch, fill
from jaxir.runtime.partitioning import MeshConfig

ROWS = (1, 2, 4, 8, 16)  # possible numbers of rows in a batch
SHORTEST = 16  # the smallest length of a batch, in tokens
FINE_UP_TO = 128  # up to this length in tokens, a CPU has a program for each multiple of `SHORTEST`
FIRST_LENGTH = 64  # length of the shape for short texts that is compiled before the first request
# Number of padding tokens that take as long as one more batch. On a CPU, time grows with tokens; on an
# accelerator, with batches.
CALL_TOKENS = {"cpu": 16}
ACCELERATOR_CALL_TOKENS = 32_768
Shape = tuple[int, int]  # (rows, length in tokens)


class FewShapes:
    """Runs functions of a model on small batches of token ids, on this process's first device.

    Attributes:
      compiled: the programs that are ready, as (function, rows, length).
    """

    def __init__(self, model: nnx.Module):
        self.compiled: frozenset[tuple[Function, int, int]] = frozenset()
        self._lock = threading.Lock()  # protects `compiled`
        self._runner = Runner(model, MeshConfig().build(local_devices()[:1]))
        self._threads = ThreadPoolExecutor(RUNNERS, thread_name_prefix="runner")
        self._batch_tokens = self._runner.batch_tokens
        self._is_cpu = jax.default_backend() == "cpu"
        self._call_tokens = CALL_TOKENS.get(jax.default_backend(), ACCELERATOR_CALL_TOKENS)

    def shapes(self, max_length: int) -> list[Shape]:
        """Returns all shapes for texts of up to `max_length` tokens, the most useful first."""
        shapes = itertools.product(ROWS, lengths_up_to(max_length, is_fine=self._is_cpu))
        fit = [s for s in shapes if s[0] == 1 or s[0] * s[1] <= self._batch_tokens]
        return sorted(fit, key=lambda shape: (shape[0] != 1, -shape[0], shape[1]))

    def prepare(self, function: Function, max_length: int, *, columns: int = 1) -> None:
        """Compiles the two shapes that fit every text: one short row, and one row of the maximum length."""
        first = next(n for n in self._lengths(max_length) if n >= min(FIRST_LENGTH, max_length))
        self._compile(function, [(1, first), (1, max_length)], columns)

    def compile(
        self,
        function: Function,
        max_length: int,
        *,
        columns: int = 1,
        stop: threading.Event | None = None,
    ) -> None:
        """Compiles a function of `columns` arrays for each new shape, two at a time, until `stop` is set."""
        shapes = self.shapes(max_length)
        for at in range(0, len(shapes), 2):
            if stop is not None and stop.is_set():
                return
            self._compile(function, shapes[at : at + 2], columns)

    def run(
        self,
        function: Function,
        *columns: Sequence[np.ndarray],
        max_length: int,
        of: tuple[int, ...] = (),
    ) -> np.ndarray:
        """Returns float32 [N, *of] for N rows of token ids, equal to `Runner.run` up to rounding."""
        self.prepare(function, max_length, columns=len(columns))  # compiles only if the function is new
        results = np.empty([len(columns[0]), *of], np.float32)
        ready = [(rows, length) for compiled, rows, length in self.compiled if compiled is function]
        plan = lay_out([len(row) for row in columns[0]], ready, call_tokens=self._call_tokens)

        def compute(batch: tuple[int, int, list[int]]) -> None:
            rows, length, chosen = batch
            arrays = [fill(column, Batch(np.array(chosen), rows, length)) for column in columns]
            arrays[0][len(chosen) :, 0] = 1  # a padding row gets one token, so that no row is empty
            results[chosen] = self._runner.call(function, *arrays)[: len(chosen)]

        if len(plan) == 1:
            compute(plan[0])
        else:
            plan.sort(key=lambda batch: -batch[0] * batch[1])
            list(self._threads.map(compute, plan))
        return results

    def _lengths(self, max_length: int) -> list[int]:
        return lengths_up_to(max_length, is_fine=self._is_cpu)

    def _compile(self, function: Function, shapes: Sequence[Shape], columns: int) -> None:
        missing = [s for s in dict.fromkeys(shapes) if (function, *s) not in self.compiled]
        if not missing:
            return
        with ThreadPoolExecutor(2, thread_name_prefix="compiler") as pool:
            list(pool.map(lambda shape: self._compile_one(function, shape, columns), missing))

    def _compile_one(self, function: Function, shape: Shape, columns: int) -> None:
        with self._runner.program(function).compiling(self._runner.parameters, [shape], columns):
            pass
        with self._lock:
            self.compiled |= {(function, *shape)}


def lengths_up_to(max_length: int, *, is_fine: bool = False) -> list[int]:
    """Returns the lengths that a batch can have, in tokens: 16, 32, 64, 128, ... and `max_length`.

    With `is_fine` all multiples of 16 up to 128, and also 192, 384, ...: less padding, but more programs.
    """
    lengths, power = {max_length}, SHORTEST
    while power < max_length:
        lengths |= {power, 3 * power // 2} if is_fine and power > SHORTEST else {power}
        power *= 2
    lengths |= set(range(SHORTEST, FINE_UP_TO + 1, SHORTEST)) if is_fine else set()
    return sorted(length for length in lengths if length <= max_length)


def lay_out(
    token_counts: Sequence[int], shapes: Collection[Shape], *, call_tokens: int
) -> list[tuple[int, int, list[int]]]:
    """Returns batches (rows, length in tokens, positions of texts) for N texts with these token counts.

    Each batch has one of `shapes`, of which one must be as long as the longest text. A batch may have more
    rows than texts, if at most `call_tokens` padding tokens save a batch.
    """
    rows_of: dict[int, list[int]] = {}
    for rows, length in sorted(shapes):
        rows_of.setdefault(length, []).append(rows)
    lengths = sorted(rows_of)
    texts_of: dict[int, list[int]] = {}
    for text, count in enumerate(token_counts):
        texts_of.setdefault(next(length for length in lengths if length >= count), []).append(text)
    plan = []
    for length, texts in texts_of.items():
        allowed = rows_of[length]
        while texts:
            rows = max((r for r in allowed if r <= len(texts)), default=allowed[0])
            wider = next((r for r in allowed if r > len(texts)), None)
            if rows < len(texts) and wider and (wider - len(texts)) * length <= call_tokens:
                rows = wider
            plan.append((rows, length, texts[:rows]))
            texts = texts[rows:]
    return plan
