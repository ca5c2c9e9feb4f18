"""Metrics and evaluations of a run while it trains: read or run, checked, logged and shown."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.training.run.logs import Narrator
from jaxir.training.run.profiling import peak_memory
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_directory import RunDirectory
from jaxir.training.step.train_state import Metrics, TrainState
from jaxir.training.suite import Suite

NO_NEGATIVES = (
    "no pair of the {} has a negative, so the loss is 0 whatever the model does: no hard negatives but the"
    " passages themselves, and no other pairs with another query and another passage (by their ids)"
)


class Reporter:
    """Reads metrics and evaluations, refuses what is not finite, and logs and shows the rest.

    Args:
      recipe: of the run.
      directory: of the run, begun.
      suite: the evaluators.
      start: the step that the run starts after.
      ideal_seconds: the least time that the chips need for a step; None where their speed is not known.
      figures: values that every logged line has.
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
        self._log = directory.log(start)
        self._narrator = Narrator(
            steps=recipe.steps,
            start_step=start,
            batch_size=recipe.batch_size,
            evaluations_from=suite.count_from,
        )
        self._warned: set[tuple[str, str]] = set()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._narrator.close()

    def say(self, line: str) -> None:
        """Prints a line above the progress bar."""
        self._narrator.say(line)

    def paused(self, *, evaluating: bool) -> contextlib.AbstractContextManager[None]:
        """Leaves what happens inside out of the examples per second."""
        return self._narrator.paused(evaluating=evaluating)

    def step(self, done: int, metrics: Metrics) -> None:
        """Reads the metrics of a step and shows them; logs those of every `log_every`th step.

        Raises:
          UserError: the loss or the gradient is not finite, or the first batch has no negatives.
        """
        values = {k: float(v) for k, v in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(values[name]):
                self.fail(f"step {done}: {name} is {values[name]}")
        self._check_negatives(done, values)
        self._narrator.step(done, values["loss"])
        if done % self._recipe.log_every == 0 or done == self._recipe.steps:
            own = dict(values)
            values["examples_per_second"] = self._narrator.lap(done)
            values["step_seconds"] = self._recipe.batch_size / values["examples_per_second"]
            if self._ideal_seconds is not None:
                values["mfu"] = self._ideal_seconds / values["step_seconds"]
            values |= peak_memory(jax.local_devices()) | self._figures
            self._log.write(done, values)
            self._narrator.tell(done, values, own)

    def evaluate(self, done: int, state: TrainState) -> float | None:
        """Runs the evaluators that are due after a step; returns the dev metric, None if it is not measured.

        Raises:
          UserError: an evaluator fails, or measures what is not finite.
        """
        try:
            scores = self._suite.measure(done, state)
        except UserError as error:
            self.fail(str(error), error)
        self._check_negatives(done, scores, "dev batches")
        self._log.write(done, {f"dev/{k}": v for k, v in scores.items()})
        named = {k: scores[k] for k in self._suite.directions if k in scores}
        others = {k: v for k, v in scores.items() if k not in named}
        self._narrator.tell_dev(done, named, others)
        return scores.get(self._recipe.dev_metric)

    def settle_checkpoint(self) -> None:
        """Waits for the checkpoint in writing, and logs that it is whole."""
        self._log.checkpoint(self._checkpoints.settle())

    def poll_checkpoint(self) -> None:
        """Logs that the checkpoint in writing is whole, if it is by now."""
        self._log.checkpoint(self._checkpoints.poll())

    def bring_logs(self) -> None:
        """Brings the logs to the run's bucket, before a checkpoint that a resume starts from."""
        self._log.bring()

    def fail(self, why: str, cause: Exception | None = None) -> NoReturn:
        """Raises a UserError that says why training stops, and where the last good checkpoint is."""
        self.settle_checkpoint()
        raise UserError(f"{why}; training stopped, {self._checkpoints.last_good()}") from cause

    def _check_negatives(self, done: int, values: Mapping[str, float], what: str = "batch") -> None:
        for name, share in values.items():
            part, _, metric = name.rpartition("/")
            if metric != "rows_without_negatives" or share < 1 - 1e-6:
                continue
            of_part = f"{part}: " if part else ""
            sentence = f"step {done}: {of_part}{NO_NEGATIVES.format(what)}"
            if done == 1 and what == "batch":
                raise UserError(f"{sentence}; give other pairs, hard negatives or a larger batch_size")
            if (name, what) not in self._warned:
                self.say(f"warning: {sentence}")
                self._warned.add((name, what))
