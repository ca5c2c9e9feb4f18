"""The evaluators of a run: when they are due, and which of their metrics chooses the best checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.text_data import TextData
from jaxir.runtime.distributed import as_first
from jaxir.training.evaluators.evaluation_context import EVALUATED, Bench
from jaxir.training.evaluators.evaluator import Evaluator, Prepared, check_evaluators
from jaxir.training.evaluators.loss import Loss
from jaxir.training.evaluators.retrieval import Retrieval
from jaxir.training.run.class_settings import beyond_fields
from jaxir.training.run.function_code import is_installed_class
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_fingerprint import describe
from jaxir.training.step.length import in_steps
from jaxir.training.step.train_state import TrainState


def evaluators_of(recipe: Recipe) -> list[Evaluator]:
    """Returns the evaluators of a recipe: those for its dev pairs, then those in `recipe.evaluators`.

    Dev pairs are evaluated by `Retrieval` if the model makes vectors, and by `Loss` if the objective reads
    plain pairs.
    """
    found: list[Evaluator] = []
    if recipe.dev is not None and recipe.objective.searched_on_pairs:
        found.append(Retrieval(data=recipe.dev, distractors=recipe.dev_distractors))
    if recipe.dev is not None and recipe.objective.evaluated_on_pairs:
        found.append(Loss(data=recipe.dev))
    if recipe.dev is not None and not found:
        raise UserError(
            f"{type(recipe.objective).__name__} cannot be evaluated on dev pairs: it has neither vectors nor"
            " a loss for them; leave dev (DEV_SPLIT) out, and give an evaluator, such as Reranking(...) of"
            " jaxir.training.evaluators.reranking (gin/evaluators/reranking.gin)"
        )
    found.extend(recipe.evaluators or ())
    if recipe.early_stopping is not None and not found:
        raise UserError(
            f"early_stopping={recipe.early_stopping} counts evaluations, but nothing is evaluated: give dev"
            " (DEV_SPLIT) or evaluators, or leave early_stopping out"
        )
    check_evaluators(found, recipe.dev_metric)
    return found


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Prefixes the message of an error with `where`, such as the evaluator that raised it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error


def _settings(evaluator: Evaluator) -> str:
    """Returns a text with the settings of a user-defined evaluator, which a resumed run compares.

    Data are left out, because their fingerprint is compared; paths are left out, because files may move.
    """
    if is_installed_class(type(evaluator)):
        return ""
    values = {f.name: getattr(evaluator, f.name) for f in dataclasses.fields(evaluator)}
    values |= beyond_fields(evaluator)
    compared = {
        name: value
        for name, value in sorted(values.items())
        if name not in ("name", "every", "metrics")
        and not isinstance(value, os.PathLike | TextData | Dataset)
    }
    return f"{EVALUATED}{type(evaluator).__qualname__}: {describe(compared)}" if compared else ""


class Suite:
    """Reads the data of evaluators, and runs those that are due after a step.

    Args:
      evaluators: the evaluators, as `evaluators_of` returns them.
      bench: the tokenizer, training settings and programs that evaluators use.
      best_by: the metric that chooses the best checkpoint.
      eval_every: number of steps between evaluations, for evaluators without `every`.
      steps: number of steps of the run; after the last step all evaluators are due.
    """

    def __init__(
        self, evaluators: Sequence[Evaluator], bench: Bench, *, best_by: str, eval_every: int, steps: int
    ):
        self.evaluators, self.bench, self._steps = evaluators, bench, steps
        self._parts = []
        for evaluator in evaluators:
            every = eval_every if evaluator.every is None else evaluator.every
            every = in_steps(f"{evaluator}: every", every, steps)
            with _naming(f"evaluator {evaluator}"):
                self._parts.append((evaluator, evaluator.prepare(bench), every))
        self.directions = {k: v for evaluator in evaluators for k, v in evaluator.directions.items()}
        self.best_by = best_by if evaluators else None

    @property
    def fingerprint(self) -> str | None:
        """A text: the metric that chooses the best checkpoint, and its data; None if nothing is evaluated."""
        for evaluator, prepared, _ in self._parts:
            if self.best_by in evaluator.directions:
                return f"{self.best_by} on {prepared.data}{_settings(evaluator)}"
        return None

    @property
    def greater_is_better(self) -> bool:
        """Whether the greatest value of the metric that chooses the best checkpoint is the best."""
        return self.directions.get(self.best_by) == "greater"

    def try_out(self, state: TrainState) -> None:
        """Evaluates once before the first step, so that errors appear early.

        Only user-defined evaluators are run and, if accuracy chooses the best checkpoint, `Loss`, because
        some objectives do not report an accuracy.
        """
        for evaluator, prepared, _ in self._parts:
            by_objective = isinstance(evaluator, Loss) and self.best_by == evaluator.full_name("accuracy")
            if by_objective or not type(evaluator).__module__.startswith("jaxir."):
                self._measured("tried before the first step", evaluator, prepared, state, {})

    def due(self, step: int) -> bool:
        return any(self._due(every, step) for _, _, every in self._parts)

    def count_from(self, step: int) -> int:
        """Returns after how many of the remaining steps (`step` included) at least one evaluator runs."""
        at = {self._steps} if self._parts else set()
        for _, _, every in self._parts:
            at.update(range(-(-step // every) * every, self._steps, every))
        return len(at)

    def measure(self, step: int, state: TrainState) -> dict[str, float]:
        """Runs the evaluators that are due after `step`; every process returns the values of process 0."""
        found: dict[str, float] = {}
        for evaluator, prepared, every in self._parts:
            if not self._due(every, step):
                continue
            found |= self._measured(f"step {step}", evaluator, prepared, state, found)
        return found

    def _measured(
        self,
        when: str,
        evaluator: Evaluator,
        prepared: Prepared,
        state: TrainState,
        before: Mapping[str, float],
    ) -> dict[str, float]:
        where = f"{when}: evaluator {evaluator}"
        with _naming(where):
            scores = prepared.measure(state)
        scores = as_first({evaluator.full_name(name): float(x) for name, x in scores.items()})
        if self.best_by in evaluator.directions and self.best_by not in scores:
            raise UserError(
                f"{where} measured no {self.best_by} (dev_metric), only {', '.join(scores)}: set dev_metric"
                " to one of these"
            )
        for name in evaluator.directions:
            if not np.isfinite(scores.get(name, 0.0)):
                raise UserError(f"{where}: the metric {name} is {scores[name]}, not a finite number")
        if both := sorted(scores.keys() & before.keys()):
            raise UserError(f"{where} measures {both[0]}, as another evaluator does: give it a `name`")
        return scores

    def _due(self, every: int, step: int) -> bool:
        return step % every == 0 or step == self._steps
