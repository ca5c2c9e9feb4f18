"""The objective's loss on dev data."""

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
    """The loss of training and the objective's own metrics, without dropout.

    They are means over the full batches of a fixed order. Rows after the last full batch do not count: with
    in-batch negatives, a smaller or padded batch has another loss. If there are fewer rows than a batch of
    training, they are one smaller batch of as many rows as the devices can share. A run whose best checkpoint
    is chosen by it is resumed on devices that can share as many.

    Attributes:
      data: has the fields that the objective reads: a `data.text_data.TextData`.
      num_negatives: hard negatives of each pair. Of longer lists, some items are drawn, always the same ones.
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
            raise UserError(f"there are only {count} dev pairs, fewer than the {divisor} devices of a batch")
        # If there are fewer rows than a batch, keep as many as the devices can share.
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
