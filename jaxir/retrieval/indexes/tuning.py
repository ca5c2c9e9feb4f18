"""Tunes an approximate index to search only as far as a wanted recall needs, and measures recall."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.formats.sources import read_queries
from jaxir.retrieval.encoding.stored_embeddings import StoredEmbeddings
from jaxir.retrieval.indexes.base_index import Embeddings, VectorIndex, build_index
from jaxir.retrieval.indexes.entries_index import EntriesIndex, entry_ids
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.exact_rows import Storage
from jaxir.retrieval.indexes.scann_index import TUNED_FOR, ScannIndex
from jaxir.storage.npy import gather

K = TUNED_FOR
SAMPLE = 1000  # maximum number of queries; half are tuned on, half are measured
REORDER = (12, 14, 17, 20, 25, 30, 40, 50, 70, 100, 140, 200, 280, 400, 560, 800, 1100, 1600)
FIRST = REORDER.index(140)
STEP = 1.3  # ratio of successive numbers of leaves to try, until one suffices and another does not
NEAR = 0.03  # tolerance of the number of leaves, as a share of it
SLOWER = 1.25  # stop trying numbers of candidates when the time exceeds the best time by this factor
REPEATS = 2  # number of time measurements; the shortest time is used


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """Recall@10 against exact search, on queries (or passages used as queries) that were not tuned on."""

    value: float
    queries: int
    of_passages: bool

    def __str__(self) -> str:
        what = "passages used as queries" if self.of_passages else "held-out queries"
        return f"recall@{K} {self.value:.4f} against exact search on {self.queries} {what}"


class Trial:
    """Queries [Q, D] (None: passages of the index) and their true neighbours among vectors [N, D]."""

    def __init__(
        self,
        embeddings: Embeddings,
        ids: Sequence[str],
        *,
        similarity: str,
        queries: np.ndarray | None = None,
        seed: int = 0,
    ):
        shards = [embeddings] if isinstance(embeddings, np.ndarray) else list(embeddings)
        rng = np.random.default_rng(seed)
        count = len(ids) if queries is None else len(queries)
        if count < 2:
            raise UserError("an index cannot be tuned on fewer than two queries: give more --queries")
        rows = np.sort(rng.choice(count, min(SAMPLE, count), replace=False))
        self.of_passages = queries is None
        self._own = [ids[row] if self.of_passages else None for row in rows]
        self.queries = gather(shards, rows) if queries is None else queries[rows]
        exact = ExactIndex.build(shards, ids, similarity=similarity)
        _, found = exact.search(self.queries, K + 1)
        self._true = [set(self._without_own(i, answers)) for i, answers in enumerate(found)]

    def tuning(self) -> np.ndarray:
        return np.arange(0, len(self.queries), 2)

    def recall(self, index: VectorIndex, which: np.ndarray) -> float:
        _, found = index.search(self.queries[which], K + 1)
        hits = [
            len(self._true[i].intersection(self._without_own(i, answers))) / len(self._true[i])
            for i, answers in zip(which, found, strict=True)
        ]
        return statistics.fmean(hits)

    def measure(self, index: VectorIndex) -> Recall:
        which = np.arange(1, len(self.queries), 2)
        return Recall(value=self.recall(index, which), queries=len(which), of_passages=self.of_passages)

    def _without_own(self, i: int, answers: Sequence[str]) -> list[str]:
        return [doc_id for doc_id in answers if doc_id != self._own[i]][:K]


def tune(index: ScannIndex, trial: Trial, *, target: float) -> tuple[ScannIndex, Recall]:
    """Returns an index that searches no further than `target` needs, and its recall on other queries.

    For each number of candidates, from 140 down and then up, finds the least number of leaves that reaches
    the target. Of these settings, the one with the least CPU time is used. An index without a tree is not
    changed. If no setting reaches the target, the index searches all leaves with the most candidates.
    """
    if not 0 < target < 1:
        raise UserError(f"target_recall must be between 0 and 1, not {target}")
    if "leaves" not in index.info.settings:
        return index, trial.measure(index)
    which, leaves = trial.tuning(), index.info.settings["leaves"]
    best = index.with_settings(leaves_to_search=leaves, reorder=REORDER[-1])
    least, near = float("inf"), max(1, leaves // 16)
    for order in (REORDER[FIRST::-1], REORDER[FIRST + 1 :]):
        for reorder in order:
            tried = _narrowest(index.with_settings(reorder=reorder), trial, target=target, near=near)
            if tried is None and reorder <= REORDER[FIRST]:
                break  # fewer candidates have even less recall
            if tried is None:
                continue
            near, seconds = tried.info.settings["leaves_to_search"], _seconds(tried, trial.queries[which])
            if seconds < least:
                best, least = tried, seconds
            elif seconds > SLOWER * least:
                break
    return best, trial.measure(best)


def _narrowest(index: ScannIndex, trial: Trial, *, target: float, near: int) -> ScannIndex | None:
    which, leaves = trial.tuning(), index.info.settings["leaves"]
    fewest = _fewest(
        lambda number: trial.recall(index.with_settings(leaves_to_search=number), which) >= target,
        near=near,
        most=leaves,
    )
    return None if fewest is None else index.with_settings(leaves_to_search=fewest)


def _fewest(reached: Callable[[int], bool], *, near: int, most: int) -> int | None:
    """Returns about the least number up to `most` for which the monotone `reached` is true; else None."""
    low, high, number = 0, None, near  # `reached` is false for `low` and true for `high`; None: not found yet
    while high is None or high - low > max(1, NEAR * high):
        if reached(number):
            high = number
        elif number == most:
            return None
        else:
            low = number
        if high is None:
            number = min(most, max(low + 1, round(STEP * low)))
        elif low == 0:
            number = min(high - 1, int(high / STEP))
        else:
            number = (low + high) // 2
    return high


def build_tuned(
    stored: StoredEmbeddings,
    *,
    backend: Literal["scann", "exact"] = "scann",
    storage: Storage,
    target: float | None,
    queries: str | None,
    model: str | None,
) -> tuple[VectorIndex, Recall | None]:
    """Builds an index of jaxir.encode's vectors and measures its recall against exact search in float32.

    With --expansion=corpus, the recall counts vectors, not documents. The recall is None if the index has
    a single passage and there are neither `queries` nor a target.

    Args:
      target: the recall that ScaNN is tuned for, and that an exact index has on TPUs; None only measures.
      queries: queries.jsonl[.gz]; None: passages are used as queries.
      model: the model that encodes queries; None: the model that encoded the passages.
    """
    if stored.info.expansion == "corpus":
        apart = dataclasses.replace(
            stored, info=dataclasses.replace(stored.info, expansion=None), ids=entry_ids(stored.ids)
        )
        index, recall = build_tuned(
            apart, backend=backend, storage=storage, target=target, queries=queries, model=model
        )
        return EntriesIndex(index), recall
    info, vectors, model = stored.info, None, model or stored.info.model
    if queries is not None:
        from jaxir.retrieval.encoding.text_encoder import DualEncoder

        if model is None:
            raise UserError("the embeddings do not name the model that made them: give --model")
        texts = [query.text for query in read_queries(queries)]
        encoder = DualEncoder.load(model, weights=info.weights)
        # Check the fingerprint, not the name: a model of this name may have been trained further.
        stored.require_model(encoder)
        vectors = encoder.encode_queries(texts)
    options = {"storage": storage}
    if target is None and vectors is None and info.count == 1:
        return build_index(stored, backend=backend, model=model, **options), None
    trial = Trial(stored.shards, stored.ids, similarity=info.similarity, queries=vectors)
    if backend == "exact":
        options["target_recall"] = target
    index = build_index(stored, backend=backend, model=model, **options)
    if backend == "scann" and target is not None:
        return tune(index, trial, target=target)
    return index, trial.measure(index)


def _seconds(index: VectorIndex, queries: np.ndarray) -> float:
    """Returns the CPU time of searching: unlike wall time, it hardly depends on other processes."""
    taken = []
    for _ in range(REPEATS):
        started = time.process_time()
        index.search(queries, K)
        taken.append(time.process_time() - started)
    return min(taken)
