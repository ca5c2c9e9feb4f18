"""What is measured while a model trains: an evaluator's data, its metrics and how to measure a state."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Interval
from jaxir.training.evaluators.evaluation_context import Bench, State

Direction = Literal["greater", "smaller"]  # the better value of a metric


class Prepared(NamedTuple):
    """An evaluator with its data read.

    Attributes:
      measure: state -> {metric: value}, with at least the metrics that the evaluator names. Others are
        logged, but cannot choose the best checkpoint.
      data: a fingerprint of its data; a run whose best checkpoint this evaluator chooses is resumed on the
        same only.
    """

    measure: Callable[[State], Mapping[str, float]]
    data: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator(abc.ABC):
    """Measures the model in training: one file, a frozen dataclass of its settings, with its own data.

    Attributes:
      metrics: the names of its metrics, and which value of each is better.
      name: prefix of the names of its metrics, as in NAME/METRIC; needed if two evaluators have the same
        metrics.
      every: steps between its evaluations; below 1, a share of all steps; None: the run's `eval_every`.
    """

    metrics: ClassVar[Mapping[str, Direction]]
    name: str = ""
    every: Interval | None = None

    @abc.abstractmethod
    def prepare(self, bench: Bench) -> Prepared:
        """Reads the data and makes the programs that will run on them; see `Bench`."""

    @property
    def directions(self) -> dict[str, Direction]:
        """The metrics by their names in logs."""
        return {self.full_name(metric): direction for metric, direction in self.metrics.items()}

    def full_name(self, metric: str) -> str:
        """Returns a metric's name in logs."""
        return f"{self.name}/{metric}" if self.name else metric

    def __str__(self) -> str:
        kind = type(self).__name__
        return f"{kind} {self.name!r}" if self.name else kind


def check_evaluators(evaluators: Any, best_by: str) -> None:
    """Checks evaluators before any data are read: their types and the names of their metrics.

    `best_by` is the metric that chooses the best checkpoint; without evaluators, no metric does.
    """
    found: dict[str, Evaluator] = {}
    for evaluator in evaluators:
        if not isinstance(evaluator, Evaluator):
            raise UserError(f"evaluators must be objects such as Retrieval(...), not {evaluator!r:.80}")
        for metric in evaluator.directions:
            if metric in found:
                raise UserError(
                    f"evaluators {found[metric]} and {evaluator} both measure {metric}: give one a name"
                )
            found[metric] = evaluator
    if found and best_by not in found:
        raise UserError(
            f"there is no dev metric {best_by!r}, only {', '.join(found)}{suggest(best_by, found)}"
        )
