"""A cross-encoder as the last stage of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jaxir.core.platforms import local_devices
from jaxir.retrieval.encoding.pair_scorer import CrossEncoder, score_pairs
from jaxir.retrieval.ranking.runs import rank
from jaxir.serving.batcher import Batcher
from jaxir.serving.few_shapes import FewShapes

MAX_BATCH = 256  # maximum number of (question, document) pairs in a batch
Pair = tuple[str, str]


class Reranker:
    """Scores the first `depth` documents of each question; one batch may serve several clients."""

    def __init__(self, spec: str, *, depth: int):
        self.encoder, self.depth = CrossEncoder.load(spec, devices=local_devices()[:1]), depth
        self.shapes = FewShapes(self.encoder.model)

    def warm_up(self) -> None:
        """Compiles the model for every batch shape."""
        self.shapes.compile(score_pairs, self.encoder.max_length, columns=2)

    def score(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns the logit of each pair, equal to that of `CrossEncoder.score` up to rounding."""
        tokens = self.encoder.tokens(pairs)
        columns = [pair.ids for pair in tokens], [pair.types for pair in tokens]
        scores = self.shapes.run(score_pairs, *columns, max_length=self.encoder.max_length)
        return self.encoder.checked(scores).tolist()

    def new_batcher(self, max_waiting: int) -> Batcher[Pair, float]:
        """Makes the batcher, an async context manager; the pairs of `max_waiting` questions may wait."""
        waiting = max_waiting * self.depth
        self.batcher = Batcher(self.score, max_batch=MAX_BATCH, max_waiting=waiting, name="reranker")
        return self.batcher

    async def rerank(
        self, queries: Sequence[str], found: Sequence[Sequence[str]], text_of: Callable[[str], str]
    ) -> tuple[list[dict[str, float]], float]:
        """Returns {document id: score}, best first, for each query, and the milliseconds that it took.

        Scores the first `depth` ids of each query in `found`, with texts from `text_of`.
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
