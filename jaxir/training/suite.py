"""The evaluators of a run: when each is due, what it measures, and what tells the best checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxir.core.errors import UserError
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
from jaxir.training.step.train_state import Plan, TrainState


def evaluators_of(recipe: Recipe) -> list[Evaluator]:
    """Returns the evaluators of a recipe: of its dev pairs, then the others that it has.

    Dev pairs are evaluated by retrieval, where the model makes vectors, and where plain pairs have what the
    objective reads, by its loss.

    Raises:
      UserError: nothing can be measured on its dev pairs; or see `check_evaluators`.
    """
    found: list[Evaluator] = []
    if recipe.dev is not None and recipe.objective.searched_on_pairs:
        found.append(Retrieval(data=recipe.dev, distractors=recipe.dev_distractors))
    if recipe.dev is not None and recipe.objective.evaluated_on_pairs:
        found.append(Loss(data=recipe.dev))
    if recipe.dev is not None and not found:
        raise UserError(
            f"{type(recipe.objective).__name__} has neither vectors to search dev pairs by nor a loss of"
            " them: leave dev (DEV_SPLIT) out, and give an evaluator, such as Reranking(...) of"
            " jaxir.training.evaluators.reranking (gin/evaluators/reranking.gin)"
        )
    found.extend(recipe.evaluators or ())
    check_evaluators(found, recipe.dev_metric)
    return found


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Has errors say where they were raised."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error


def _settings(evaluator: Evaluator) -> str:
    """Returns the settings of an evaluator that is not jaxir's, as a resume compares them.

    Data are left out because their fingerprint is compared, and paths because files may move.
    """
    if is_installed_class(type(evaluator)):
        return ""
    values = {f.name: getattr(evaluator, f.name) for f in dataclasses.fields(evaluator)}
    values |= beyond_fields(evaluator)
    told = {
        name: value
        for name, value in sorted(values.items())
        if name not in ("name", "every", "metrics")
        and not isinstance(value, os.PathLike)
        and not any(hasattr(value, method) for method in ("build", "once", "batches"))
    }
    return f"{EVALUATED}{type(evaluator).__qualname__}: {describe(told)}" if told else ""


class Suite:
    """Evaluators with their data read; those that are due measure the state after a step.

    Args:
      evaluators: which; as `evaluators_of` gives them.
      bench: what they measure with.
      best_by: the metric that tells the best checkpoint.
      eval_every: steps between evaluations, of evaluators that say nothing else.
      steps: of the run; after the last one all are due.

    Raises:
      UserError: an evaluator's data cannot be had.
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
    def told(self) -> str | None:
        """What the best checkpoint goes by, and on which data; None where nothing is evaluated."""
        for evaluator, prepared, _ in self._parts:
            if self.best_by in evaluator.directions:
                return f"{self.best_by} on {prepared.data}{_settings(evaluator)}"
        return None

    @property
    def greater_is_better(self) -> bool:
        """Of the metric that tells the best checkpoint."""
        return self.directions.get(self.best_by) == "greater"

    def compile(self, plan: Plan) -> None:
        """Compiles all that will be run."""
        self.bench.compile(plan)

    def try_out(self, state: TrainState) -> None:
        """Has evaluators measure once, so that faults show before the first step.

        They are those that are not jaxir's and, where the best checkpoint goes by another of its metrics than
        the loss, that of the objective, which may have no such metric.

        Raises:
          UserError: one has not measured what it names.
        """
        for evaluator, prepared, _ in self._parts:
            by_objective = isinstance(evaluator, Loss) and self.best_by == evaluator.full_name("accuracy")
            if by_objective or not type(evaluator).__module__.startswith("jaxir."):
                self._measured("tried before the first step", evaluator, prepared, state, {})

    def due(self, step: int) -> bool:
        """Returns whether any evaluator measures after `step`."""
        return any(self._due(every, step) for _, _, every in self._parts)

    def count_from(self, step: int) -> int:
        """Returns after how many steps, `step` and later ones, any evaluator measures."""
        at = {self._steps} if self._parts else set()
        for _, _, every in self._parts:
            at.update(range(-(-step // every) * every, self._steps, every))
        return len(at)

    def measure(self, step: int, state: TrainState) -> dict[str, float]:
        """Returns what the evaluators that are due measure; in every process what the first one has.

        Raises:
          UserError: an evaluator does, or has not measured what it names.
        """
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
        self._check(where, evaluator, scores, before)
        return scores

    def _due(self, every: int, step: int) -> bool:
        return step % every == 0 or step == self._steps

    def _check(
        self, where: str, evaluator: Evaluator, scores: Mapping[str, float], before: Mapping[str, float]
    ) -> None:
        if self.best_by in evaluator.directions and self.best_by not in scores:
            raise UserError(f"{where} has measured no {self.best_by}, only {', '.join(scores)}")
        for name in evaluator.directions:
            if not np.isfinite(scores.get(name, 0.0)):
                raise UserError(f"{where}: {name} is {scores[name]}")
        if both := sorted(scores.keys() & before.keys()):
            raise UserError(f"{where} measures {both[0]}, as another one does: give it a name")
