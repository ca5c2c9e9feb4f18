"""Evaluation inside the training loop: dev loss, in-batch accuracy and retrieval over a small corpus."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxir.errors import UserError
from jaxir.evaluation.retrieval import evaluate_run
from jaxir.models.products import as_run_on
from jaxir.objectives.objective import Objective
from jaxir.partitioning import Partitioner
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.training.state import Batch, Plan, TrainState, make_loss

RETRIEVAL_METRICS = ("RR@10", "nDCG@10")
METRICS = (*RETRIEVAL_METRICS, "accuracy", "loss")
DEPTH = 10
TOWERS = ("query", "passage")


def check_metric(metric: str, objective: Objective) -> None:
    """Raises a UserError unless `metric` is one that tells the best checkpoint under `objective`."""
    if metric not in METRICS:
        raise UserError(f"there is no dev metric {metric!r}; known are {', '.join(METRICS)}")
    if metric not in RETRIEVAL_METRICS and not objective.evaluated_on_pairs:
        raise UserError(
            f"dev_metric={metric} cannot be had: dev pairs have not what {objective!r} reads; give one of"
            f" {', '.join(RETRIEVAL_METRICS)}"
        )


class DevEvaluation:
    """Evaluates the parameters of a model on dev pairs, without dropout.

    `loss` and the objective's metrics (`accuracy`, ...) are means over the full batches of a fixed order;
    the rows left after the last full one do not count there, for a smaller or filled-up batch would have
    other in-batch negatives. RR@10 and nDCG@10 count every pair: each distinct query is searched among the
    distinct passages of the dev pairs and the distractors, where texts with the same token ids are one.

    Args:
      pairs: the dev pairs, an ArrayDataset.
      plan: the model and what is beside it, as sharded shapes.
      objective: the objective of training.
      partitioner: the mesh.
      batch_size: rows of a batch; fewer where there are fewer dev pairs.
      training_pairs: where distractors come from.
      distractors: how many passages of `training_pairs` join the dev corpus.

    Raises:
      UserError: there are fewer dev pairs than devices that share a batch, or all dev queries or passages
        have the same tokens.
    """

    def __init__(
        self,
        pairs: Any,
        *,
        plan: Plan,
        objective: Objective,
        partitioner: Partitioner,
        batch_size: int,
        training_pairs: Any,
        distractors: int,
    ):
        divisor = partitioner.batch_divisor()
        self._batch_size = min(batch_size, pairs.num_examples) // divisor * divisor
        if not self._batch_size:
            raise UserError(
                f"there are only {pairs.num_examples} dev pairs, fewer than the {divisor} devices of a batch"
            )
        rows = read_rows(pairs, pairs.num_examples)
        extra = read_rows(training_pairs, min(distractors, training_pairs.num_examples))
        self._rows = {name: stack([row[name] for row in rows]) for name in rows[0]}
        self._ids, self._texts = {}, {}
        for tower in TOWERS:
            feature = f"{tower}_ids"
            tokens = [row[feature] for row in (rows + extra if tower == "passage" else rows)]
            names = [trim(x).tobytes().hex() for x in tokens]
            distinct = dict(zip(names, tokens, strict=True))
            ids = {row[f"{tower}_key"].tobytes() for row in rows if f"{tower}_key" in row}
            if len(distinct) == 1 < len(ids):
                raise UserError(
                    f"all {len(ids):,} texts of the dev pairs' {tower} tower have the same tokens, so that"
                    " any answer would be right: does the tokenizer know their words?"
                )
            self._ids[tower], self._texts[tower] = list(distinct), stack(list(distinct.values()))
            if tower == "passage":
                self._passages = names
            else:
                self._queries = names
        self._qrels: dict[str, dict[str, int]] = {}
        for query, passage in zip(self._queries, self._passages, strict=False):
            self._qrels.setdefault(query, {})[passage] = 1
        self._sharding = partitioner.sharding(("batch",))
        whole = NamedSharding(partitioner.mesh, PartitionSpec())

        loss_of = make_loss(plan, objective)

        def metrics_of(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
            trained = plan.trained(state.params, state.auxiliary)
            loss, (metrics, _) = loss_of(trained, state, batch, None)
            return metrics | {"loss": loss}

        def encode(params: Any, ids: jax.Array, tower: str) -> jax.Array:
            return nnx.merge(plan.graphdef, params).encode(ids, tower=tower, key=None)

        with partitioner(), as_run_on(partitioner.mesh):
            batch = {k: self._abstract(x) for k, x in self._rows.items()}
            evaluated = plan.abstract._replace(opt_state={})
            self._metrics_of = None
            if objective.evaluated_on_pairs:
                self._metrics_of = jax.jit(metrics_of, out_shardings=whole).lower(evaluated, batch).compile()
            jitted = jax.jit(encode, static_argnames="tower", out_shardings=whole)
            self._encode = {
                tower: jitted.lower(
                    plan.abstract.params, self._abstract(self._texts[tower]), tower=tower
                ).compile()
                for tower in TOWERS
            }

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Returns metric -> value, for `METRICS` and whatever else the objective measures."""
        if self._metrics_of is None:
            return self._retrieve(state.params)
        size, state = self._batch_size, state._replace(opt_state={})
        full = [
            self._metrics_of(state, {k: self._place(x[at : at + size]) for k, x in self._rows.items()})
            for at in range(0, len(self._rows["query_ids"]) - size + 1, size)
        ]
        read = jax.device_get(full)
        scores = {name: float(np.mean([m[name] for m in read], dtype=np.float64)) for name in read[0]}
        return scores | self._retrieve(state.params)

    def _retrieve(self, params: Any) -> dict[str, float]:
        vectors = {tower: self._embed(params, tower) for tower in TOWERS}
        # Vectors are as the model's similarity wants them, so the inner product is it.
        index = ExactIndex.build([vectors["passage"]], self._ids["passage"], similarity="dot")
        scores, ids = index.search(vectors["query"], min(DEPTH, len(self._ids["passage"])))
        run = {
            query: dict(zip(found, map(float, row), strict=True))
            for query, found, row in zip(self._ids["query"], ids, scores, strict=True)
        }
        return evaluate_run(run, self._qrels, RETRIEVAL_METRICS).values

    def _embed(self, params: Any, tower: str) -> np.ndarray:
        texts, size = self._texts[tower], self._batch_size
        parts = []
        for at in range(0, len(texts), size):
            part = texts[at : at + size]
            padded = np.pad(part, [(0, size - len(part)), (0, 0)])
            parts.append(self._encode[tower](params, self._place(padded)))
        return np.concatenate(jax.device_get(parts))[: len(texts)]

    def _abstract(self, rows: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = (self._batch_size, *rows.shape[1:])
        return jax.ShapeDtypeStruct(shape, rows.dtype, sharding=self._sharding)

    def _place(self, rows: np.ndarray) -> jax.Array:
        """Puts a batch that every process holds whole onto the mesh."""
        return jax.make_array_from_callback(rows.shape, self._sharding, lambda index: rows[index])


def read_rows(pairs: Any, count: int) -> list[Mapping[str, np.ndarray]]:
    """Returns the first `count` examples of the dataset's first epoch, in the order of seed 0."""
    batches: Iterator[Mapping[str, np.ndarray]] = (
        pairs.batches(batch_size=1, seed=0, start_step=0, process_index=0, process_count=1)
        if count
        else iter(())
    )
    return [{k: x[0] for k, x in batch.items()} for batch in itertools.islice(batches, count)]


def stack(rows: list[np.ndarray]) -> np.ndarray:
    """Stacks arrays of one rank; shorter ones are filled with 0, which is padding."""
    shape = np.max([row.shape for row in rows], axis=0)
    out = np.zeros((len(rows), *shape), rows[0].dtype)
    for place, row in zip(out, rows, strict=True):
        place[tuple(slice(n) for n in row.shape)] = row
    return out


def trim(ids: np.ndarray) -> np.ndarray:
    """Returns ids [L] without the padding on the right."""
    return ids[: int(np.max(np.nonzero(ids)[0], initial=-1)) + 1]
