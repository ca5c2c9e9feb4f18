"""The base class of evaluators, which measure the model at some steps while it trains."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Interval
from jaxir.training.evaluators.evaluation_context import Bench, State

Direction = Literal["greater", "smaller"]  # which values of a metric are better


class Prepared(NamedTuple):
    """The result of `Evaluator.prepare`: how to measure a state, on data that are already read.

    Attributes:
      measure: maps a state to {metric: value}, with at least the metrics in `Evaluator.metrics`. Other
        metrics are logged, but cannot choose the best checkpoint.
      data: a fingerprint of the evaluator's data. If the evaluator chooses the best checkpoint, the run can
        only be resumed with the same data.
    """

    measure: Callable[[State], Mapping[str, float]]
    data: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator(abc.ABC):
    """Measures the model in training; a subclass is a frozen dataclass of settings, and has its own data.

    Attributes:
      metrics: for each metric's name, whether the greater or the smaller value is better.
      name: prefix of metrics' names in logs, as in NAME/METRIC; required if two evaluators have the same
        metrics.
      every: steps between evaluations; below 1, a share of all steps; by default the run's `eval_every`.
    """

    metrics: ClassVar[Mapping[str, Direction]]
    name: str = ""
    every: Interval | None = None

    @abc.abstractmethod
    def prepare(self, bench: Bench) -> Prepared:
        """Reads the data, and makes the programs that measure a state on the data; see `Bench`."""

    @property
    def directions(self) -> dict[str, Direction]:
        """The direction of each metric, "greater" or "smaller", by the metric's name in logs."""
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
                    f"evaluators {found[metric]} and {evaluator} both measure {metric}: give one a `name`"
                )
            found[metric] = evaluator
    if found and best_by not in found:
        raise UserError(
            f"dev_metric is {best_by!r}, but only {', '.join(found)} are measured{suggest(best_by, found)}"
        )
