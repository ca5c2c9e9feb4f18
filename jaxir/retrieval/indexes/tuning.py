"""How far an approximate index must look for a wanted recall, found by trying, and what an index reaches."""

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
SAMPLE = 1000  # queries, half of them to tune on and half to report on
REORDER = (12, 14, 17, 20, 25, 30, 40, 50, 70, 100, 140, 200, 280, 400, 560, 800, 1100, 1600)
FIRST = REORDER.index(140)
STEP = 1.3  # between the numbers of leaves that are tried, until the fewest lie between two of them
NEAR = 0.03  # a share of the leaves that is not looked for more closely
SLOWER = 1.25  # where so much is lost, there is no better number of candidates beyond
REPEATS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """What share of the ten nearest documents an index finds.

    Attributes:
      value: recall@10 against exact search, from 0 to 1, on queries that nothing was tuned on.
      queries: their number.
      of_passages: whether they are passages of the index (each left out of its own answers), for want of
        queries.
    """

    value: float
    queries: int
    of_passages: bool

    def __str__(self) -> str:
        what = "passages taken for queries" if self.of_passages else "held-out queries"
        return f"recall@{K} {self.value:.4f} against exact search on {self.queries} {what}"


class Trial:
    """Queries and their true neighbours, for one index.

    Args:
      embeddings: the vectors [N, D] of the index, or shards of them.
      queries: vectors [Q, D]; None takes passages.

    Raises:
      UserError: there are fewer than two queries.
    """

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
            raise UserError("an index cannot be tuned on fewer than two queries")
        rows = np.sort(rng.choice(count, min(SAMPLE, count), replace=False))
        self.of_passages = queries is None
        self._own = [ids[row] if self.of_passages else None for row in rows]
        self.queries = gather(shards, rows) if queries is None else queries[rows]
        exact = ExactIndex.build(shards, ids, similarity=similarity)
        _, found = exact.search(self.queries, K + 1)
        self._true = [set(self._without_own(i, answers)) for i, answers in enumerate(found)]

    def tuning(self) -> np.ndarray:
        """The queries to tune on, every other one."""
        return np.arange(0, len(self.queries), 2)

    def recall(self, index: VectorIndex, which: np.ndarray) -> float:
        """Returns an index's recall@10 on some of the queries."""
        _, found = index.search(self.queries[which], K + 1)
        hits = [
            len(self._true[i].intersection(self._without_own(i, answers))) / len(self._true[i])
            for i, answers in zip(which, found, strict=True)
        ]
        return statistics.fmean(hits)

    def measure(self, index: VectorIndex) -> Recall:
        """Returns an index's recall@10 on the queries that are not tuned on."""
        which = np.arange(1, len(self.queries), 2)
        return Recall(value=self.recall(index, which), queries=len(which), of_passages=self.of_passages)

    def _without_own(self, i: int, answers: Sequence[str]) -> list[str]:
        return [doc_id for doc_id in answers if doc_id != self._own[i]][:K]


def tune(index: ScannIndex, trial: Trial, *, target: float) -> tuple[ScannIndex, Recall]:
    """Returns an index that looks no further than `target` needs, and the recall it has on other queries.

    From some number of candidates to compare again down, and then up, the fewest leaves are found that reach
    the target, near those before; of these settings the one that takes the least CPU time. An index that
    searches by brute force is returned as it is. Where no setting reaches the target, the furthest-looking
    one is taken.

    Raises:
      UserError: `target` is not between 0 and 1.
    """
    check_target(target)
    if "leaves" not in index.info.settings:
        return index, trial.measure(index)
    which, leaves = trial.tuning(), index.info.settings["leaves"]
    best = index.with_settings(leaves_to_search=leaves, reorder=REORDER[-1])
    least, near = float("inf"), max(1, leaves // 16)
    for order in (REORDER[FIRST::-1], REORDER[FIRST + 1 :]):
        for reorder in order:
            tried = _narrowest(index.with_settings(reorder=reorder), trial, target=target, near=near)
            if tried is None and reorder <= REORDER[FIRST]:
                break  # with fewer candidates it is further away
            if tried is None:
                continue
            near, seconds = tried.info.settings["leaves_to_search"], _seconds(tried, trial.queries[which])
            if seconds < least:
                best, least = tried, seconds
            elif seconds > SLOWER * least:
                break
    return best, trial.measure(best)


def _narrowest(index: ScannIndex, trial: Trial, *, target: float, near: int) -> ScannIndex | None:
    """Returns an index that looks into the fewest leaves that reach the target, looking from `near` on."""
    which, leaves = trial.tuning(), index.info.settings["leaves"]
    fewest = _fewest(
        lambda number: trial.recall(index.with_settings(leaves_to_search=number), which) >= target,
        near=near,
        most=leaves,
    )
    return None if fewest is None else index.with_settings(leaves_to_search=fewest)


def _fewest(reached: Callable[[int], bool], *, near: int, most: int) -> int | None:
    """Returns about the least number from 1 to `most` that is `reached`, as all above it are, or None."""
    low, high, number = 0, None, near  # low is not reached, high is
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
    """Builds an index of what `encode` wrote and measures its recall against exact search in float32.

    Of several vectors of a document (corpus expansion) it is the recall of vectors. Of a single passage, and
    without queries, there is nothing to measure.

    Args:
      target: the recall that ScaNN is tuned for, and that an exact index has on TPUs; None only measures.
      queries: queries.jsonl[.gz]; None takes passages.
      model: encodes queries, where it is not the one that encoded the passages.

    Raises:
      UserError: a target out of range, or queries that cannot be read or encoded, or only by another model
        than the one that made the embeddings.
    """
    if target is not None:
        check_target(target)
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
            raise UserError("the embeddings do not say which model made them: give --model")
        texts = [query.text for query in read_queries(queries)]
        encoder = DualEncoder.load(model)
        stored.require_model(encoder)  # trained on since, it has the same name
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


def check_target(target: float) -> None:
    """Raises a UserError where `target` is no recall to tune for."""
    if not 0 < target < 1:
        raise UserError(f"target_recall must be between 0 and 1, not {target}")


def _seconds(index: VectorIndex, queries: np.ndarray) -> float:
    """Returns the CPU time of the queries, which others on the machine change least."""
    taken = []
    for _ in range(REPEATS):
        started = time.process_time()
        index.search(queries, K)
        taken.append(time.process_time() - started)
    return min(taken)
