"""Texts to vectors in a few compiled shapes, all of which can be compiled before the first client comes.

`DualEncoder` picks the shapes that suit many texts; it would compile while a client waits. Here lengths are
16, 32, 64 ... up to the tower's maximum and rows 1, 2, 4, 8, 16, whatever the texts are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from jaxir.errors import UserError
from jaxir.models.layers import param_shardings
from jaxir.models.products import as_run_on
from jaxir.partitioning import MeshConfig
from jaxir.retrieval.encoding.dual_encoder import DualEncoder

Tower = Literal["query", "passage"]

ROWS = (1, 2, 4, 8, 16)
SHORTEST = 16
# Tokens that a batch may hold beyond one row, and padded tokens that one batch less is worth: on a CPU time
# goes by tokens, on an accelerator by batches.
BATCH_TOKENS = {"cpu": 1024}
ACCELERATOR_BATCH_TOKENS = 32_768
CALL_TOKENS = {"cpu": 16}
ACCELERATOR_CALL_TOKENS = 32_768


class FewShapes:
    """Encodes small numbers of texts on the first device of this process.

    Args:
      encoder: the model.

    Attributes:
      compiled: the programs that there are: (tower, rows, length).
    """

    def __init__(self, encoder: DualEncoder):
        self.encoder = encoder
        self.compiled: set[tuple[Tower, int, int]] = set()
        graph, state = nnx.split(encoder.model)
        partitioner = MeshConfig().build(jax.local_devices()[:1])
        shardings = param_shardings(state, partitioner)
        self._state = jax.device_put(state, shardings)
        platform = jax.default_backend()
        self._batch_tokens = BATCH_TOKENS.get(platform, ACCELERATOR_BATCH_TOKENS)
        self._call_tokens = CALL_TOKENS.get(platform, ACCELERATOR_CALL_TOKENS)

        batch = partitioner.sharding(("batch", "length"))

        @functools.partial(
            jax.jit, static_argnames=["tower"], in_shardings=(shardings, batch), out_shardings=batch
        )
        def program(state: Any, ids: jax.Array, tower: Tower) -> jax.Array:
            with partitioner(), as_run_on(partitioner.mesh):
                return nnx.merge(graph, state).encode(ids, tower=tower)

        self._program = program

    def shapes(self, tower: Tower) -> list[tuple[int, int]]:
        """Returns the shapes (rows, length) that texts of a tower are laid out in."""
        lengths = lengths_up_to(self.encoder.text_settings(tower)[1])
        return [s for s in itertools.product(ROWS, lengths) if s[0] == 1 or s[0] * s[1] <= self._batch_tokens]

    def compile(self, tower: Tower) -> None:
        """Compiles all shapes of a tower, two at a time."""
        with ThreadPoolExecutor(2, thread_name_prefix="compiler") as pool:
            runs = [pool.submit(self._run, np.ones(shape, np.int32), tower) for shape in self.shapes(tower)]
            for run in runs:
                run.result()

    def encode(self, texts: Sequence[str], tower: Tower) -> np.ndarray:
        """Returns float32 vectors [N, D] of N texts, to rounding the ones that `DualEncoder.encode` gives.

        Raises:
          UserError: the model gives vectors that are not finite.
        """
        prompt, max_length = self.encoder.text_settings(tower)
        tokens = self.encoder.tokenizer.encode_batch([prompt + t for t in texts], max_length=max_length)
        vectors = np.empty([len(texts), self.encoder.dimension], np.float32)
        plan = lay_out(
            [len(t) for t in tokens],
            lengths=lengths_up_to(max_length),
            batch_tokens=self._batch_tokens,
            call_tokens=self._call_tokens,
        )
        for rows, length, chosen in plan:
            ids = np.zeros([rows, length], np.int32)
            for row, text in enumerate(chosen):
                ids[row, : len(tokens[text])] = tokens[text]
            ids[len(chosen) :, 0] = 1
            vectors[chosen] = self._run(ids, tower)[: len(chosen)]
        if not np.isfinite(vectors).all():
            raise UserError(f"model {self.encoder.spec} gives vectors that are not finite")
        return vectors

    def _run(self, ids: np.ndarray, tower: Tower) -> np.ndarray:
        vectors = np.asarray(self._program(self._state, ids, tower))
        self.compiled.add((tower, *ids.shape))
        return vectors


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
