"""What is measured while a model trains: data, the names of metrics, and how they are had of a state."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Interval
from jaxir.training.evaluators.evaluation_context import Bench, State

Direction = Literal["greater", "smaller"]  # which value of a metric is better


class Prepared(NamedTuple):
    """An evaluator with its data read.

    Attributes:
      measure: state -> {metric: value}, with at least the metrics that the evaluator names; what else it
        returns is logged, but cannot tell the best checkpoint.
      data: tells its data from any other; a run whose best checkpoint goes by this evaluator is resumed on
        the same only.
    """

    measure: Callable[[State], Mapping[str, float]]
    data: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator(abc.ABC):
    """A judge of the model in training: one file, a frozen dataclass of its settings, which owns its data.

    Attributes:
      metrics: the names of what it measures, and which value of each is better.
      name: put before the names of its metrics, as NAME/METRIC; wanted where two evaluators have the same.
      every: steps between its evaluations; below 1, a share of all steps; None: the run's `eval_every`.
    """

    metrics: ClassVar[Mapping[str, Direction]]
    name: str = ""
    every: Interval | None = None

    @abc.abstractmethod
    def prepare(self, bench: Bench) -> Prepared:
        """Reads the data and says which programs will be run on them; see `Bench`.

        Raises:
          UserError: the data cannot be had, or nothing can be measured on them.
        """

    @property
    def directions(self) -> dict[str, Direction]:
        """The metrics by the names that logs have."""
        return {self.full_name(metric): direction for metric, direction in self.metrics.items()}

    def full_name(self, metric: str) -> str:
        """Returns the name that logs have of a metric."""
        return f"{self.name}/{metric}" if self.name else metric

    def __str__(self) -> str:
        kind = type(self).__name__
        return f"{kind} {self.name!r}" if self.name else kind


def check_evaluators(evaluators: Any, best_by: str) -> None:
    """Checks what can be known of evaluators before any data are read.

    Args:
      evaluators: those of a run; of none, nothing tells the best checkpoint.
      best_by: the metric that does.

    Raises:
      UserError: something in the list is no evaluator, two have a metric of the same name, or none measures
        `best_by`.
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
