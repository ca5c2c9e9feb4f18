"""The evaluator `Retrieval`: search in a small corpus, the passages of dev pairs and distractors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Natural, Object, checked
from jaxir.evaluation.retrieval_metrics import evaluate_run
from jaxir.objectives.pair_batch import pair_features
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.training.evaluators.evaluation_context import Bench, State, read_rows, stack
from jaxir.training.evaluators.evaluator import Direction, Evaluator, Prepared

DEPTH = 10
METRICS = ("nDCG@10", "RR@10")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Retrieval(Evaluator):
    """Mean nDCG@10 and RR@10 of dev queries, searched among the dev passages.

    Each distinct query is searched among the distinct passages of the dev pairs and the distractors. Texts
    with the same token ids are not distinct.

    Attributes:
      data: the dev pairs, a `data.batches.text_data.TextData`.
      distractors: number of training passages to add to the dev passages.
      dimensions: for each number D, the metrics of the first D dimensions, normalised again, are measured
        too, as `nDCG@10/D` and `RR@10/D` (see `losses.matryoshka`).
    """

    data: Object | None
    distractors: Natural = 0
    dimensions: list[Count] = dataclasses.field(default_factory=list)

    @property
    def metrics(self) -> dict[str, Direction]:
        """The metrics of full vectors, then those of truncated vectors."""
        return {f"{metric}{end}": "greater" for end in self._cuts() for metric in METRICS}

    def _cuts(self) -> dict[str, int | None]:
        """Returns {suffix of metrics' names: number of dimensions}; None means all dimensions."""
        return {"": None} | {f"/{dimension}": dimension for dimension in self.dimensions}

    def prepare(self, bench: Bench) -> Prepared:
        form = dataclasses.replace(bench.form, num_negatives=0)
        examples = bench.examples(self.data, pair_features(form))
        rows = examples.rows
        training = bench.training_data
        extra = read_rows(training, self.distractors) if self.distractors else []
        if extra and "passage_ids" not in extra[0]:
            raise UserError(
                "distractors are training passages, but the training data have none: set dev_distractors to 0"
            )
        queries, query_ids = _distinct(rows, [], "query")
        passages, passage_ids = _distinct(rows, extra, "passage")
        judgements: dict[str, dict[str, int]] = {}
        for query, passage in zip(queries, passages, strict=False):
            judgements.setdefault(query, {})[passage] = 1
        of_queries = self._vectors(bench, stack(list(query_ids.values())), "query")
        of_passages = self._vectors(bench, stack(list(passage_ids.values())), "passage")

        def search(queries: np.ndarray, passages: np.ndarray) -> Mapping[str, float]:
            # For models with cosine similarity the vectors are normalised, so "dot" is right for all models.
            index = ExactIndex.build([passages], list(passage_ids), similarity="dot")
            scores, ids = index.search(queries, min(DEPTH, len(passage_ids)))
            run = {
                query: dict(zip(found, map(float, row), strict=True))
                for query, found, row in zip(query_ids, ids, scores, strict=True)
            }
            return evaluate_run(run, judgements, METRICS).values

        def measure(state: State) -> Mapping[str, float]:
            vectors = of_queries(state), of_passages(state)
            found: dict[str, float] = {}
            for end, dimension in self._cuts().items():
                values = search(*(_first(x, dimension) for x in vectors))
                found |= {f"{metric}{end}": value for metric, value in values.items()}
            return found

        return Prepared(measure, f"{examples.fingerprint}, {self.distractors} distractors")

    def _vectors(self, bench: Bench, ids: np.ndarray, tower: str) -> Callable[[State], np.ndarray]:
        """Like `Bench.vectors`, but raises a UserError if the vectors have too few dimensions."""

        def encode(model: Any, _: Any, batch: Mapping[str, Any]) -> Any:
            vectors = model.encode(batch["ids"], tower=tower)
            if (most := max(self.dimensions, default=0)) > vectors.shape[1]:
                raise UserError(f"{self}: vectors have {vectors.shape[1]} dimensions, fewer than {most}")
            return vectors

        return bench.program(encode, {"ids": ids}).of_rows


def _first(vectors: np.ndarray, dimension: int | None) -> np.ndarray:
    """Returns the first `dimension` dimensions of vectors [N, D], normalised; if None, the same vectors."""
    if dimension is None:
        return vectors
    cut = vectors[:, :dimension]
    return cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)


def _distinct(
    rows: Sequence[Mapping[str, np.ndarray]], extra: Sequence[Mapping[str, np.ndarray]], tower: str
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Returns a name for each text of a tower, the same for equal tokens, and {name: token ids}."""
    tokens = [row[f"{tower}_ids"] for row in (*rows, *extra)]
    names = [x[x != 0].tobytes().hex() for x in tokens]
    distinct = dict(zip(names, tokens, strict=True))
    ids = {row[f"{tower}_key"].tobytes() for row in rows if f"{tower}_key" in row}
    if len(distinct) == 1 < len(ids):
        raise UserError(
            f"all {len(ids):,} texts of the dev pairs' {tower} tower have the same tokens, so any search"
            " result would be right: give a model whose tokenizer knows their words, or other dev pairs"
        )
    return names, distinct
