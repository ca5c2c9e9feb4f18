"""The settings of a training run as one object, which `train` runs and `plan` plans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jaxir.core.errors import UserError
from jaxir.core.values import BatchSize, Count, Interval, Natural, Object, Positive, Seed, Steps, checked
from jaxir.training.step.length import check_length, in_steps, steps_of

if TYPE_CHECKING:  # importing `partitioning` would import JAX
    from jaxir.runtime.partitioning import Partitioner


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Recipe:
    """All settings of a training run except its directory; `python -m jaxir.train` has them as flags.

    Attributes:
      model: Pretrained(...) or FromScratch(...) of jaxir.interop.build.
      objective: the training method, such as Contrastive(loss=...) of jaxir.objectives.contrastive.
      data: training pairs, such as BeirPairs(...) of jaxir.data.sets.pair_sources.
      steps: number of optimizer steps; give either steps or epochs.
      epochs: number of times to go through the training pairs.
      min_steps: minimum number of steps of a run whose length is given in epochs.
      batch_size: number of pairs per step, over all devices together.
      dev: pairs to evaluate on while training (nDCG@10, RR@10, accuracy, loss); none by default.
      evaluators: further evaluators, a list such as [STS(...)] of jaxir.training.evaluators.
      optimizer: AdamW(...) or Adafactor(...) of jaxir.training.step.optimizers; AdamW() by default.
      mesh: MeshConfig(...) of jaxir.runtime.partitioning; by default the batch is split over all devices.
      num_negatives: number of hard negatives per pair; the data must have them.
      frozen: patterns of names of parameters that are not trained, such as "encoder.embedding.*". Such a
        parameter stays in bfloat16 if it was stored in bfloat16 and is computed in it.
      auxiliary_from: a run from whose auxiliary parameters (heads, decoders, temperatures) this run starts;
        MODEL=RUN does the same for the model.
      seed: determines the values of new parameters, the order of the data and dropout.
      log_every: number of steps between log lines.
      eval_every: number of steps between evaluations, for evaluators without `every`; a value below 1 is a
        share of all steps.
      checkpoint_every: number of steps between checkpoints; a value below 1 is a share of all steps.
      keep_last: number of newest checkpoints to keep; the best checkpoint is kept, too.
      dev_metric: the metric of an evaluator that chooses the best checkpoint.
      early_stopping: number of evaluations in a row without a better dev_metric after which training stops.
      dev_distractors: number of training passages to add to the dev passages that are searched.
      on_bad_input: "stop" at the first malformed record, or "skip" and count malformed records.
      profile_steps: the first and the last step to trace, such as 10:13 (docs/training.md).
      trackers: where metrics go beside log.jsonl and TensorBoard: wandb (Weights & Biases) or trackio.
    """

    model: Object
    objective: Object
    data: Object | None  # None in plans, which read no data
    steps: Steps | None = None
    epochs: Positive | None = None
    min_steps: Steps = 1
    batch_size: BatchSize
    dev: Object | None = None
    evaluators: Sequence[Object] | None = None
    optimizer: Object | None = None
    mesh: Object | None = None
    num_negatives: Natural = 0
    frozen: list[str] | None = None
    auxiliary_from: str | None = None
    seed: Seed = 0
    log_every: Count = 10
    eval_every: Interval = 100
    checkpoint_every: Interval = 500
    keep_last: Count = 2
    dev_metric: str = "nDCG@10"
    early_stopping: Count | None = None
    dev_distractors: Natural = 0
    on_bad_input: Literal["stop", "skip"] = "stop"
    profile_steps: str | None = None
    trackers: list[Literal["wandb", "trackio"]] | None = None

    def __post_init__(self):
        from jaxir.objectives.objective import Objective  # imports JAX

        check_length(self.steps, self.epochs)
        if not isinstance(self.objective, Objective):
            kind = type(self.objective)
            raise UserError(
                "objective must be an Objective of jaxir.objectives.objective, not a"
                f" {kind.__module__}.{kind.__qualname__}"
            )

    def settled(self, num_examples: int | None = None) -> Recipe:
        """Returns the recipe with defaults filled in, and shares and epochs converted to steps."""
        from jaxir.runtime.partitioning import MeshConfig
        from jaxir.training.step.optimizers import AdamW

        steps = self.steps
        if steps is None:
            steps = steps_of(
                self.epochs, pairs=num_examples, batch_size=self.batch_size, min_steps=self.min_steps
            )
        optimizer = self.optimizer or AdamW()
        optimizer.build(steps)
        return dataclasses.replace(
            self,
            steps=steps,
            epochs=None,
            objective=self.objective.settled(functools.partial(in_steps, steps=steps)),
            optimizer=optimizer,
            mesh=self.mesh or MeshConfig(),
            eval_every=in_steps("eval_every", self.eval_every, steps),
            checkpoint_every=in_steps("checkpoint_every", self.checkpoint_every, steps),
        )

    def check_batch(self, partitioner: Partitioner) -> None:
        """Raises a UserError unless the devices, and the objective's chunks if any, divide the batch."""
        divisor = partitioner.batch_divisor()
        if self.batch_size % divisor:
            raise UserError(
                f"batch_size must be a multiple of the {divisor} devices that share it, not {self.batch_size}"
            )
        rows = self.batch_size // divisor
        for chunks in _chunks(self.objective):
            if rows % chunks:
                where = f" on each of the {divisor} devices that share it" if divisor > 1 else ""
                raise UserError(
                    f"a batch of {rows} examples{where} cannot be embedded in {chunks} equal chunks: set"
                    " chunks to a number that divides the batch"
                )


def _chunks(objective: Any) -> Iterator[int]:
    """Yields the number of chunks of an objective, and of each objective in its fields."""
    if isinstance(chunks := getattr(objective, "chunks", None), int):
        yield chunks
    fields = dataclasses.fields(objective) if dataclasses.is_dataclass(objective) else ()
    for value in (getattr(objective, field.name) for field in fields):
        for part in value.values() if isinstance(value, Mapping) else (value,):
            if dataclasses.is_dataclass(part):
                yield from _chunks(part)
