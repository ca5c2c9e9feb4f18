"""The evaluator `Retrieval`: search in a small corpus, the passages of dev pairs and distractors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Natural, Object, checked
from jaxir.evaluation.retrieval_metrics import evaluate_run
from jaxir.losses import TokenVectors
from jaxir.objectives.pair_batch import pair_features
from jaxir.retrieval.indexes.in_memory import index_of
from jaxir.training.evaluators.evaluation_context import (
    Bench,
    State,
    TokenWeights,
    embedded,
    read_rows,
    stack,
)
from jaxir.training.evaluators.evaluator import Direction, Evaluator, Prepared

DEPTH = 10
METRICS = ("nDCG@10", "RR@10")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Retrieval(Evaluator):
    """Mean nDCG@10 and RR@10 of dev queries, searched among the dev passages.

    Each distinct query is searched among the distinct passages of the dev pairs and the distractors. Texts
    with the same token ids are not distinct. Vectors of tokens, of a multi-vector encoder, are compared by
    MaxSim, and stay in the memory of the host.

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
        queries, distinct_queries = _distinct(rows, [], "query")
        passages, distinct_passages = _distinct(rows, extra, "passage")
        judgements: dict[str, dict[str, int]] = {}
        for query, passage in zip(queries, passages, strict=False):
            judgements.setdefault(query, {})[passage] = 1
        of_queries = self._vectors(bench, list(distinct_queries.values()), "query")
        of_passages = self._vectors(bench, list(distinct_passages.values()), "passage")

        def search(queries: Any, passages: Any) -> Mapping[str, float]:
            # Vectors of models with cosine similarity are normalised, so "dot" is right for all models.
            how = "dot"
            if isinstance(queries, TokenVectors):
                # A query's weight changes no order, so "maxsim" is right.
                queries, passages, how = _scored(queries), _scored(passages), "maxsim"
            index = index_of(passages, list(distinct_passages), similarity=how)
            scores, ids = index.search(queries, min(DEPTH, len(distinct_passages)))
            run = {
                query: dict(zip(found, map(float, row), strict=False))
                for query, found, row in zip(distinct_queries, ids, scores, strict=True)
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

    def _vectors(
        self, bench: Bench, texts: Sequence[Mapping[str, np.ndarray]], tower: Literal["query", "passage"]
    ) -> Callable[[State], Any]:
        """Returns a function that maps a state to the vectors of texts; checks their number of dimensions.

        A multi-vector encoder gives `TokenVectors`.

        If the model's pooling leaves out prompts, it leaves out as many tokens as each text's prompt has.
        """
        rows = {"ids": stack([text[f"{tower}_ids"] for text in texts])}
        if bench.form.prompt_tokens is not None:
            usual = dict(zip(("query", "passage"), bench.form.prompt_tokens, strict=True))[tower]
            found = [text.get(f"{tower}_prompt_tokens", usual) for text in texts]
            rows["left_out"] = np.array(found, np.int32)

        def encode(model: Any, _: Any, batch: Mapping[str, Any]) -> Any:
            if hasattr(model, "token_vectors"):
                if self.dimensions:
                    raise UserError(f"{self}: the model makes a vector of each token: leave dimensions out")
                return model.token_vectors([(batch["ids"], tower, None)])[0]
            vectors = embedded(model, tower=tower, **batch)
            if isinstance(vectors, TokenWeights):
                if self.dimensions:
                    raise UserError(f"{self}: the model makes token weights: leave dimensions out")
            elif (most := max(self.dimensions, default=0)) > vectors.shape[1]:
                raise UserError(
                    f"{self}: dimensions has {most}, but the vectors have only {vectors.shape[1]}"
                )
            return vectors

        return bench.program(encode, rows).of_rows


def _scored(texts: TokenVectors) -> list[np.ndarray]:
    """Returns the vectors [tokens, D] of each text's scored tokens."""
    return [vectors[mask] for vectors, mask in zip(*texts[:2], strict=True)]


def _first(vectors: Any, dimension: int | None) -> Any:
    """Returns the first `dimension` dimensions of vectors [N, D], normalised; None: the vectors unchanged."""
    if dimension is None:
        return vectors
    cut = vectors[:, :dimension]
    return cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)


def _distinct(
    rows: Sequence[Mapping[str, np.ndarray]], extra: Sequence[Mapping[str, np.ndarray]], tower: str
) -> tuple[list[str], dict[str, Mapping[str, np.ndarray]]]:
    """Returns a name for each text of a tower, the same for equal tokens, and {name: its row}."""
    texts = [*rows, *extra]
    names = [ids[ids != 0].tobytes().hex() for ids in (text[f"{tower}_ids"] for text in texts)]
    distinct = dict(zip(names, texts, strict=True))
    ids = {row[f"{tower}_key"].tobytes() for row in rows if f"{tower}_key" in row}
    if len(distinct) == 1 < len(ids):
        raise UserError(
            f"all {len(ids):,} texts of the dev pairs' {tower} tower have the same tokens, so any search"
            " result would be right: give a model whose tokenizer knows their words, or other dev pairs"
        )
    return names, distinct
