"""A cross-encoder, or a hybrid encoder, as the last stage of a search."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxir.core.platforms import local_devices
from jaxir.retrieval.encoding.any_encoder import kind_of
from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder
from jaxir.retrieval.encoding.pair_scorer import CrossEncoder, score_pairs
from jaxir.retrieval.ranking.runs import rank
from jaxir.serving.batcher import Batcher
from jaxir.serving.few_shapes import FewShapes

MAX_BATCH = 256  # maximum number of (question, document) pairs in a batch
Pair = tuple[str, str]


class Judged(NamedTuple):
    """A pair's logit or similarity, and the number of its tokens that the model read."""

    logit: float
    tokens: int


class Reranker:
    """Scores the first `depth` documents of each question; one batch may serve several clients."""

    def __init__(self, spec: str, *, depth: int):
        self.encoder, self.depth = CrossEncoder.load(spec, devices=local_devices()[:1]), depth
        self.shapes = FewShapes(self.encoder.model)

    @property
    def compiled_shapes(self) -> int:
        """The number of compiled programs that are counted."""
        return len(self.shapes.compiled)

    def prepare(self) -> None:
        """Compiles the shapes that the first request needs."""
        self.shapes.prepare(score_pairs, self.encoder.max_length, columns=2)

    def compile_rest(self, stop: threading.Event | None = None) -> None:
        """Compiles the other shapes, until `stop` is set; runs beside requests."""
        self.shapes.compile(score_pairs, self.encoder.max_length, columns=2, stop=stop)

    def score(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns the logit of each pair, equal to that of `CrossEncoder.score` up to rounding."""
        return [judged.logit for judged in self.judge(pairs)]

    def judge(self, pairs: Sequence[Pair]) -> list[Judged]:
        """Returns the logit and the number of tokens of each pair."""
        tokens = self.encoder.tokens(pairs)
        columns = [pair.ids for pair in tokens], [pair.types for pair in tokens]
        scores = self.shapes.run(score_pairs, *columns, max_length=self.encoder.max_length)
        scores = self.encoder.checked(scores)
        return [Judged(logit, len(pair.ids)) for logit, pair in zip(scores.tolist(), tokens, strict=True)]

    def new_batcher(self, max_waiting: int) -> Batcher[Pair, Judged]:
        """Makes the batcher, an async context manager; at most the pairs of `max_waiting` questions wait."""
        waiting = max_waiting * self.depth
        self.batcher = Batcher(self.judge, max_batch=MAX_BATCH, max_waiting=waiting, name="reranker")
        return self.batcher

    async def judge_texts(self, query: str, texts: Sequence[str]) -> list[Judged]:
        """Returns the logit and the number of tokens of each text with a query.

        The pairs wait for the engine in parts, so that a long list does not delay other clients.
        """
        judged: list[Judged] = []
        for start in range(0, len(texts), MAX_BATCH):
            judged += await self.batcher.results([(query, text) for text in texts[start : start + MAX_BATCH]])
        return judged

    async def rerank(
        self, queries: Sequence[str], found: Sequence[Sequence[str]], text_of: Callable[[str], str]
    ) -> tuple[list[dict[str, float]], float]:
        """Returns {document id: score}, best first, for each query, and the milliseconds that it took.

        Scores the first `depth` ids of each query in `found`, with texts from `text_of`.
        """
        started = time.perf_counter()
        chosen = [list(ids)[: self.depth] for ids in found]
        pairs = [(q, text_of(d)) for q, ids in zip(queries, chosen, strict=True) for d in ids]
        judged = iter(await self.batcher.results(pairs))
        rankings = []
        for ids in chosen:
            of_query = {doc_id: next(judged).logit for doc_id in ids}
            rankings.append({doc_id: of_query[doc_id] for doc_id in rank(of_query)})
        return rankings, 1000 * (time.perf_counter() - started)


class HybridReranker(Reranker):
    """Scores documents by the sum of the three heads of a hybrid encoder."""

    def __init__(self, encoder: HybridEncoder, *, depth: int):
        self.encoder, self.depth = encoder, depth

    @property
    def compiled_shapes(self) -> int:
        return 0  # the encoder's own runner compiles

    def prepare(self) -> None:
        """Compiles the programs of a short pair."""
        self.judge([("a first query", "a first text")])

    def compile_rest(self, stop: threading.Event | None = None) -> None:
        """Does nothing: other shapes are compiled when a request needs them."""

    def judge(self, pairs: Sequence[Pair]) -> list[Judged]:
        """Returns the sum of the scores of each pair, and the number of tokens of its passage."""
        queries, texts = (
            {text: row for row, text in enumerate(dict.fromkeys(side))} for side in zip(*pairs, strict=True)
        )
        found = (
            self.encoder.encode(list(side), tower=tower, show_progress=False)
            for side, tower in ((queries, "query"), (texts, "passage"))
        )
        sums = self.encoder.similarity(*found)["sum"]
        counts = [len(ids) for ids in self.encoder.tokens(list(texts), "passage")]
        return [Judged(float(sums[queries[q], texts[t]]), counts[texts[t]]) for q, t in pairs]


def reranker_of(spec: str, *, depth: int) -> Reranker:
    """Loads a cross-encoder or a hybrid encoder that reranks the first `depth` documents."""
    if kind_of(spec) == "hybrid_encoder":
        return HybridReranker(HybridEncoder.load(spec), depth=depth)
    return Reranker(spec, depth=depth)
