"""The training loop: the steps, evaluations and checkpoints of a run that `trainer.prepare` has built."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.model_dir import LoadedModel
from jaxir.models.layers import Remat
from jaxir.objectives.objective import Objective
from jaxir.runtime import compile_cache, distributed
from jaxir.runtime.partitioning import Partitioner
from jaxir.training.reporter import Reporter
from jaxir.training.run.logs import timed
from jaxir.training.run.profiling import Trace, ideal_seconds, planned, steps_to_trace
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_directory import RunDirectory
from jaxir.training.step import train_state
from jaxir.training.step.memory import device_memory, fit_memory, scheduled_seconds
from jaxir.training.step.optimizers import BuiltOptimizer
from jaxir.training.step.prefetch import prefetch
from jaxir.training.stopping import StopSignal
from jaxir.training.suite import Suite

ENDED = "step {}: the data has no more batches, but the run has {} steps: make `Dataset.batches` endless"


class TrainResult(NamedTuple):
    """How a run ended.

    Attributes:
      steps: total number of steps of the run.
      started_at: number of finished steps at the start: 0, or the step of the checkpoint to resume from.
      step: number of finished steps at the end; equal to `started_at` if the run was already complete. It is
        below `steps` if a signal or early stopping ended the run.
      stopped_by: the signal that stopped the run before its last step, or None.
      best_step: the step of the best checkpoint by the dev metric, or None if no dev metric was measured.
      best_value: the dev metric of the best checkpoint, or None.
    """

    steps: int
    started_at: int
    step: int
    stopped_by: signal.Signals | None
    best_step: int | None
    best_value: float | None


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run that is ready for its next step.

    Attributes:
      recipe: the settings, with all shares converted to steps.
      directory: the run's directory, locked.
      loaded: the model, with tokenizer and settings.
      partitioner: the mesh.
      batches_from: function that maps `start_step` to the batches of this process from that step on.
      share: (part, parts): this process reads the part with number `part` of `parts` parts of each batch.
      suite: the evaluators.
      plan: the layout of the state on the mesh.
      optimizer: the optimizer, built for the number of steps of the run.
      state: the current parameters, moments of the optimizer and number of finished steps.
      start: number of finished steps at the start: 0, or the step of the checkpoint to resume from.
    """

    recipe: Recipe
    directory: RunDirectory
    loaded: LoadedModel
    partitioner: Partitioner
    batches_from: Callable[..., Iterator[Mapping[str, np.ndarray]]]
    share: tuple[int, int]
    suite: Suite
    plan: train_state.Plan
    optimizer: BuiltOptimizer
    state: train_state.TrainState
    start: int

    def train(self, *, on_start: Callable[[Path], None] = lambda _: None, kept: bool = True) -> TrainResult:
        """Trains until the last step, early stopping or a signal.

        `on_start` is called with the directory before the first step. If `kept` is false, a stopped run saves
        no checkpoint.
        """
        recipe, directory, steps = self.recipe, self.directory, self.recipe.steps
        with contextlib.ExitStack() as closing:
            closing.callback(
                lambda: train_state.put_into(self.loaded.model, self.plan.whole(self.state.params))
            )
            if ended := self._ended(self.start):
                # Also restores files of the run that are damaged or missing.
                directory.begin(self.loaded, on_start)
                directory.mark_complete(ended)
                return self._result(self.start, None)
            ahead = prefetch(
                self.batches_from(start_step=self.start),
                lambda batch: distributed.place_share(batch, self.partitioner, *self.share),
            )
            batches = closing.enter_context(ahead)
            if (first := next(batches, None)) is None:
                raise UserError(ENDED.format(self.start, steps))
            key_data = train_state.key_data_of(recipe.seed, self.plan)
            compiled_step, note, costs = self._compile(first, key_data)
            directory.begin(self.loaded, on_start)
            directory.mark_complete(None)  # a run that stopped early may be continued

            reporter = Reporter(recipe, directory, self.suite, start=self.start, **costs)
            closing.callback(reporter.narrator.close)
            if note:
                reporter.narrator.say(note)
            if self.start:
                reporter.narrator.say(f"resuming {directory.path} at step {self.start}")
            stop = closing.enter_context(StopSignal(saves=kept))
            trace = self._trace(reporter)
            closing.callback(trace.close)
            checkpoints = directory.checkpoints

            done, unread = self.start, None
            closing.enter_context(jax.transfer_guard("disallow"))
            for batch in itertools.chain([first], batches):
                trace.before(done + 1)
                self.state, metrics = compiled_step(self.state, batch, key_data)
                if traced := trace.after(done + 1, metrics):
                    reporter.narrator.say(traced)
                if unread:
                    reporter.step(*unread)
                done, unread = done + 1, (done + 1, metrics)

                stopping, evaluating = stop.requested(done), self.suite.due(done)
                saving = done % recipe.checkpoint_every == 0 or done == steps or (stopping and kept)
                if evaluating or saving:
                    reporter.step(*unread)
                    unread, value = None, None
                    with reporter.narrator.paused(evaluating=evaluating), jax.transfer_guard("allow"):
                        if evaluating:
                            value = reporter.evaluate(done, self.state)
                        best, ended = checkpoints.count(value), self._ended(done)
                        if saving or best or ended:
                            reporter.settle_checkpoint()
                            reporter.log.bring()
                            checkpoints.save(done, self.plan.saved(self.state), value)
                else:
                    reporter.poll_checkpoint()
                if stopping or ended:
                    break
            else:
                reporter.fail(ENDED.format(done, steps))

            reporter.settle_checkpoint()
            if ended:
                directory.mark_complete(ended)
            return self._result(done, None if ended else stop.received)

    def _ended(self, done: int) -> str | None:
        """Returns how the run is complete after `done` steps; None if it is not."""
        recipe, waited = self.recipe, self.directory.checkpoints.evaluations_since_best
        if done == recipe.steps:
            return f"{done} steps"
        if recipe.early_stopping is not None and waited >= recipe.early_stopping:
            return (
                f"stopped early at step {done} of {recipe.steps}, after {waited} evaluations without a better"
                f" {recipe.dev_metric}"
            )
        return None

    def _compile(
        self, batch: Any, key_data: jax.Array
    ) -> tuple[Callable[..., Any], str | None, dict[str, Any]]:
        """Compiles the step and the evaluation; for "auto" settings, chooses among several compiled steps.

        Returns the step, which maps (state, batch, key data) to (state, metrics) and donates the state; a
        note on the chosen settings, if any are "auto"; and arguments of `Reporter` on the costs of the step.
        """
        objective, partitioner, plan = self.recipe.objective, self.partitioner, self.plan

        def compiled_with(remat: Remat, objective: Objective) -> Any:
            step = train_state.make_step(plan.with_remat(remat), objective, self.optimizer)
            jitted = jax.jit(step, donate_argnums=0, out_shardings=(plan.shardings, None))
            with partitioner():
                return compile_cache.compile_step(jitted.lower(self.state, batch, key_data), partitioner)

        backbone = getattr(getattr(self.loaded.model, "config", None), "backbone", None)
        note, remat = None, getattr(backbone, "remat", False)
        with timed("compiling the step"):
            if "auto" in (remat, getattr(objective, "chunks", 1)):
                _, objective, step, note = fit_memory(
                    remat,
                    objective,
                    compiled_with,
                    rows=self.recipe.batch_size // partitioner.batch_divisor(),
                    limit=device_memory(),
                    gathers=partitioner.mesh.shape["fsdp"] > 1,
                    kernels=partitioner.on_tpu,
                    scanned=getattr(backbone, "scan_layers", False),
                    seconds_of=functools.partial(scheduled_seconds, partitioner=partitioner),
                )
            else:
                step = compiled_with(remat, objective)
            costs = {
                "ideal_seconds": ideal_seconds(plan, objective, self.state, batch, partitioner),
                "figures": planned(step, partitioner) if jax.process_index() == 0 else {},
            }
        if self.suite.evaluators:
            self.suite.bench.objective = objective  # the objective has the chosen number of chunks per batch
            with timed("compiling the evaluation"):
                self.suite.bench.compile(plan)
            self.suite.try_out(self.state)
        return step, note, costs

    def _trace(self, reporter: Reporter) -> Trace:
        to_trace = steps_to_trace(self.recipe.profile_steps, self.recipe.steps)
        trace = Trace(self.directory.path, to_trace, start_step=self.start)
        if trace.begun_before:
            reporter.narrator.say(
                f"steps {trace.begun_before} are not traced: the run resumes after step {self.start}"
            )
        return trace

    def _result(self, step: int, stopped_by: signal.Signals | None) -> TrainResult:
        best_step, best_value = self.directory.checkpoints.best() or (None, None)
        return TrainResult(self.recipe.steps, self.start, step, stopped_by, best_step, best_value)
