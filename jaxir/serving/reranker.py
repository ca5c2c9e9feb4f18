"""A cross-encoder as the last stage of a search: it reads the best documents again with the question."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxir.retrieval.encoding.cross_encoder import CrossEncoder
from jaxir.retrieval.ranking.runs import rank
from jaxir.serving.batcher import Batcher
from jaxir.serving.few_shapes import (
    ACCELERATOR_BATCH_TOKENS,
    ACCELERATOR_CALL_TOKENS,
    BATCH_TOKENS,
    CALL_TOKENS,
    ROWS,
    lay_out,
    lengths_up_to,
)

MAX_BATCH = 256  # pairs
Pair = tuple[str, str]


class Reranker:
    """Scores pairs of texts in few compiled shapes, those of all clients together.

    Args:
      spec: the cross-encoder, as `CrossEncoder.load` takes it.
      depth: documents of a question that are read.

    Attributes:
      compiled: the programs that there are: (rows, length).
      batcher: pairs to scores; `new_batcher` makes it.
    """

    def __init__(self, spec: str, *, depth: int):
        self.encoder, self.depth = CrossEncoder.load(spec, devices=jax.local_devices()[:1]), depth
        self.compiled: set[tuple[int, int]] = set()
        platform = jax.default_backend()
        self._batch_tokens = BATCH_TOKENS.get(platform, ACCELERATOR_BATCH_TOKENS)
        self._call_tokens = CALL_TOKENS.get(platform, ACCELERATOR_CALL_TOKENS)
        self._lengths = lengths_up_to(self.encoder.max_length)

    def warm_up(self) -> None:
        """Compiles all shapes, two at a time."""
        shapes = itertools.product(ROWS, self._lengths)
        with ThreadPoolExecutor(2, thread_name_prefix="compiler") as pool:
            runs = [
                pool.submit(self._run, np.ones(shape, np.int32), np.zeros(shape, np.int32))
                for shape in shapes
                if shape[0] == 1 or shape[0] * shape[1] <= self._batch_tokens
            ]
            for run in runs:
                run.result()

    def score(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns the logits of pairs, to rounding those of `CrossEncoder.score`.

        Raises:
          UserError: the model gives scores that are not finite.
        """
        tokens = self.encoder.tokens(pairs)
        scores = np.empty([len(pairs)], np.float32)
        plan = lay_out(
            [len(pair.ids) for pair in tokens],
            lengths=self._lengths,
            batch_tokens=self._batch_tokens,
            call_tokens=self._call_tokens,
        )
        for rows, length, chosen in plan:
            ids, types = np.zeros([rows, length], np.int32), np.zeros([rows, length], np.int32)
            ids[len(chosen) :, 0] = 1
            for row, number in enumerate(chosen):
                pair = tokens[number]
                ids[row, : len(pair.ids)], types[row, : len(pair.ids)] = pair.ids, pair.types
            scores[chosen] = self._run(ids, types)[: len(chosen)]
        return self.encoder.checked(scores).tolist()

    def _run(self, ids: np.ndarray, types: np.ndarray) -> np.ndarray:
        scores = np.asarray(self.encoder.run(ids, types))
        self.compiled.add(ids.shape)
        return scores

    def new_batcher(self, max_waiting: int) -> Batcher[Pair, float]:
        """Returns the batcher of all clients' pairs, to be used as an async context.

        Args:
          max_waiting: questions that may wait.
        """
        waiting = max_waiting * self.depth
        self.batcher = Batcher(self.score, max_batch=MAX_BATCH, max_waiting=waiting, name="reranker")
        return self.batcher

    async def rerank(
        self, queries: Sequence[str], found: Sequence[Sequence[str]], text_of: Callable[[str], str]
    ) -> tuple[list[dict[str, float]], float]:
        """Returns the scores of each query's documents by id, best first, and the milliseconds it took.

        Args:
          queries: texts.
          found: the ids of each query's documents, best first; the first `depth` are read.
          text_of: the text of a document.

        Raises:
          Busy: too many pairs wait.
          UserError: the model fails.
        """
        started = time.perf_counter()
        chosen = [list(ids)[: self.depth] for ids in found]
        pairs = [(q, text_of(d)) for q, ids in zip(queries, chosen, strict=True) for d in ids]
        scores = iter(await self.batcher.results(pairs))
        rankings = []
        for ids in chosen:
            of_query = {doc_id: next(scores) for doc_id in ids}
            rankings.append({doc_id: of_query[doc_id] for doc_id in rank(of_query)})
        return rankings, 1000 * (time.perf_counter() - started)
