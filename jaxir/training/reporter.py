"""Reads, checks, logs and prints the metrics of a run while it trains, and runs its evaluators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.training.run.logs import Narrator
from jaxir.training.run.profiling import peak_memory
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_directory import RunDirectory
from jaxir.training.run.trackers import plain
from jaxir.training.step.train_state import Metrics, TrainState
from jaxir.training.suite import Suite

NO_NEGATIVES = (
    "no pair of the {} has a negative, so the loss is 0 for every model: no hard negative differs from its"
    " pair's passage, and no two pairs have both different queries and different passages (by their ids)"
)


class Reporter:
    """Logs and prints metrics, runs evaluations, and stops training if a value is not finite.

    Args:
      recipe: the run's settings.
      directory: the run's directory, after `begin` was called.
      suite: the evaluators.
      start: number of finished steps at the start.
      ideal_seconds: minimum seconds per step at the peak speed of the chips; None if the chips are unknown.
      figures: constant values by name, added to each line of metrics in the log.
    """

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        suite: Suite,
        *,
        start: int,
        ideal_seconds: float | None,
        figures: Mapping[str, float],
    ):
        self._recipe, self._suite = recipe, suite
        self._checkpoints = directory.checkpoints
        self._ideal_seconds, self._figures = ideal_seconds, figures
        self.log = directory.log(start, recipe.trackers or (), plain(recipe))
        self.narrator = Narrator(
            steps=recipe.steps,
            start_step=start,
            batch_size=recipe.batch_size,
            evaluations_from=suite.count_from,
        )
        self._warned: set[tuple[str, str]] = set()

    def step(self, done: int, metrics: Metrics) -> None:
        """Reads and shows the metrics of a step; logs them at every `log_every`th step."""
        values = {k: float(v) for k, v in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(values[name]):
                self.fail(f"step {done}: the {name} is {values[name]}: lower the learning rate or warm up")
        self._check_negatives(done, values)
        self.narrator.step(done, values["loss"])
        if done % self._recipe.log_every == 0 or done == self._recipe.steps:
            own = dict(values)
            values["examples_per_second"] = self.narrator.lap(done)
            values["step_seconds"] = self._recipe.batch_size / values["examples_per_second"]
            if self._ideal_seconds is not None:
                values["mfu"] = self._ideal_seconds / values["step_seconds"]
            values |= peak_memory(jax.local_devices()) | self._figures
            self.log.write(done, values)
            self.narrator.show_step(done, values, own)

    def evaluate(self, done: int, state: TrainState) -> float | None:
        """Runs the evaluators that are due after a step; returns the dev metric if it was measured."""
        try:
            scores = self._suite.measure(done, state)
        except UserError as error:
            self.fail(str(error), error)
        self._check_negatives(done, scores, "dev batches")
        self.log.write(done, {f"dev/{k}": v for k, v in scores.items()})
        named = {k: scores[k] for k in self._suite.directions if k in scores}
        others = {k: v for k, v in scores.items() if k not in named}
        self.narrator.show_evaluation(done, named, others)
        return scores.get(self._recipe.dev_metric)

    def settle_checkpoint(self) -> None:
        """Waits for the checkpoint being written, and logs that it is complete."""
        self.log.checkpoint(self._checkpoints.settle())

    def poll_checkpoint(self) -> None:
        """Logs that the checkpoint being written is complete, if it is complete by now."""
        self.log.checkpoint(self._checkpoints.poll())

    def fail(self, why: str, cause: Exception | None = None) -> NoReturn:
        """Raises a UserError with the reason why training stops and the last good checkpoint."""
        self.settle_checkpoint()
        raise UserError(f"{why}; training stopped, {self._checkpoints.last_good()}") from cause

    def _check_negatives(self, done: int, values: Mapping[str, float], what: str = "batch") -> None:
        for name, share in values.items():
            part, _, metric = name.rpartition("/")
            if metric != "rows_without_negatives" or share < 1 - 1e-6:
                continue
            of_part = f"{part}: " if part else ""
            sentence = f"step {done}: {of_part}{NO_NEGATIVES.format(what)}"
            change = "give other pairs, hard negatives or a larger batch_size"
            if name.replace(metric, "masked_by_guide") in values:
                change += ", or a smaller guide_margin or another guide, which may leave out all negatives"
            if done == 1 and what == "batch":
                raise UserError(f"{sentence}; {change}")
            if (name, what) not in self._warned:
                self.narrator.say(f"warning: {sentence}")
                self._warned.add((name, what))
