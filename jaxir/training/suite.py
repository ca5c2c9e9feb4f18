"""The evaluators of a run: when they are due, what they measure, and which chooses the best checkpoint."""

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
    """Returns the evaluators of a recipe: those of its dev pairs, then its own.

    Dev pairs are evaluated by retrieval if the model makes vectors, and by the loss if the objective reads
    plain pairs.
    """
    found: list[Evaluator] = []
    if recipe.dev is not None and recipe.objective.searched_on_pairs:
        found.append(Retrieval(data=recipe.dev, distractors=recipe.dev_distractors))
    if recipe.dev is not None and recipe.objective.evaluated_on_pairs:
        found.append(Loss(data=recipe.dev))
    if recipe.dev is not None and not found:
        raise UserError(
            f"{type(recipe.objective).__name__} has neither vectors to search dev pairs by nor a loss on"
            " them: leave dev (DEV_SPLIT) out, and give an evaluator, such as Reranking(...) of"
            " jaxir.training.evaluators.reranking (gin/evaluators/reranking.gin)"
        )
    found.extend(recipe.evaluators or ())
    check_evaluators(found, recipe.dev_metric)
    return found


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Adds to errors where they were raised."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error


def _settings(evaluator: Evaluator) -> str:
    """Returns the settings of a user's own evaluator, as a resume compares them.

    Data are left out, because their fingerprint is compared, and paths, because files may move.
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
    """Evaluators with their data read; those that are due measure the state after a step.

    Args:
      evaluators: a result of `evaluators_of`.
      bench: what they measure with.
      best_by: the metric that chooses the best checkpoint.
      eval_every: steps between evaluations, for evaluators without `every`.
      steps: of the run; after the last one all are due.
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
        """The metric that chooses the best checkpoint, and its data; None if nothing is evaluated."""
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

        Tried are users' own evaluators and, if the best checkpoint is chosen by accuracy, the objective's
        loss, which may not have this metric.
        """
        for evaluator, prepared, _ in self._parts:
            by_objective = isinstance(evaluator, Loss) and self.best_by == evaluator.full_name("accuracy")
            if by_objective or not type(evaluator).__module__.startswith("jaxir."):
                self._measured("tried before the first step", evaluator, prepared, state, {})

    def due(self, step: int) -> bool:
        return any(self._due(every, step) for _, _, every in self._parts)

    def count_from(self, step: int) -> int:
        """Returns the number of later steps, `step` included, after which any evaluator measures."""
        at = {self._steps} if self._parts else set()
        for _, _, every in self._parts:
            at.update(range(-(-step // every) * every, self._steps, every))
        return len(at)

    def measure(self, step: int, state: TrainState) -> dict[str, float]:
        """Returns what the evaluators that are due measure; process 0's values, in every process."""
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
            raise UserError(f"{where} has measured no {self.best_by}, only {', '.join(scores)}")
        for name in evaluator.directions:
            if not np.isfinite(scores.get(name, 0.0)):
                raise UserError(f"{where}: {name} is {scores[name]}")
        if both := sorted(scores.keys() & before.keys()):
            raise UserError(f"{where} measures {both[0]}, as another one does: give it a name")
        return scores

    def _due(self, every: int, step: int) -> bool:
        return step % every == 0 or step == self._steps
