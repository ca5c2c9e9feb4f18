"""The evaluator `Loss`: the objective's loss on dev data."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Natural, Object, checked
from jaxir.objectives.gradient_cache import with_fitting_chunks
from jaxir.objectives.objective import loss_and_metrics
from jaxir.training.evaluators.evaluation_context import ONE_BATCH, Bench, State
from jaxir.training.evaluators.evaluator import Evaluator, Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Loss(Evaluator):
    """The training loss and the objective's own metrics on dev data, without dropout.

    Values are means over full batches in a fixed order. Rows after the last full batch are left out: with
    in-batch negatives, the loss depends on the batch size. If there are fewer rows than the training batch
    size, they form one smaller batch, rounded down to a multiple of the devices that share a batch. If this
    loss chooses the best checkpoint, a run is only resumed on devices with the same rounding.

    Attributes:
      data: a `data.batches.text_data.TextData` with the fields that the objective reads.
      num_negatives: hard negatives per pair. From longer lists, the same items are drawn each time.
    """

    metrics = {"loss": "smaller", "accuracy": "greater"}  # noqa: RUF012

    data: Object | None
    num_negatives: Natural = 0

    def prepare(self, bench: Bench) -> Prepared:
        form = dataclasses.replace(bench.form, num_negatives=self.num_negatives)
        features = bench.objective.features(form)
        examples = bench.examples(self.data, features, drawn=True)
        count, divisor = len(next(iter(examples.arrays.values()))), bench.partitioner.batch_divisor()
        if count < divisor:
            raise UserError(f"{count} dev pairs are too few for {divisor} devices: give more dev pairs")
        # If there are fewer rows than a batch, keep the largest multiple of the devices that share a batch.
        kept = count if count >= bench.batch_size else count // divisor * divisor
        rows = {name: array[:kept] for name, array in examples.arrays.items()}

        def metrics_of(model: Any, auxiliary: Any, batch: Any) -> dict[str, Any]:
            objective = bench.objective
            if kept < bench.batch_size:
                objective = with_fitting_chunks(objective, kept // divisor)
            loss, metrics = loss_and_metrics(objective, model, batch, None, auxiliary, None)
            return metrics | {"loss": loss}

        program = bench.program(metrics_of, rows)

        def measure(state: State) -> dict[str, float]:
            found = program.of_batches(state)
            return {name: float(np.mean([m[name] for m in found], dtype=np.float64)) for name in found[0]}

        one_batch = f"{ONE_BATCH}{kept}" if count < bench.batch_size else ""
        return Prepared(measure, f"{examples.fingerprint}{one_batch}")
