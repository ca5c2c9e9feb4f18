"""Systems with a run for each seed: their means, deviations and comparisons."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxir.evaluation.significance import Comparison, compare, holm

if TYPE_CHECKING:
    from jaxir.evaluation.exact_match import AnswerScores
    from jaxir.evaluation.retrieval_metrics import RetrievalScores


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """A system with the scores of its runs."""

    name: str
    scores: Sequence[RetrievalScores | AnswerScores]  # of each run, over the same judgements

    @property
    def metrics(self) -> list[str]:
        """The metrics, as the caller spelt them."""
        return list(self.scores[0].values)

    def mean(self, metric: str) -> float:
        """The mean over runs."""
        return float(np.mean([scores.values[metric] for scores in self.scores]))

    def deviation(self, metric: str) -> float | None:
        """The sample's standard deviation over runs; None for one run."""
        return deviation([scores.values[metric] for scores in self.scores])

    def per_query(self, metric: str) -> dict[str, float]:
        """Each query's mean over runs."""
        return over_runs([scores.per_query[metric] for scores in self.scores])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """One system against another by one metric, with p-values after Holm's correction.

    The correction is for all pairs that are compared by this metric.
    """

    system: str
    baseline: str
    metric: str
    comparison: Comparison  # of each query's values averaged over runs, without the correction
    t_test: float
    randomisation: float


def compare_systems(systems: Sequence[System], baseline: System | None) -> list[Pair]:
    """Compares every system with the baseline or, without one, with every system before it."""
    pairs = (
        [(system, baseline) for system in systems]
        if baseline is not None
        else [(later, earlier) for earlier, later in itertools.combinations(systems, 2)]
    )
    compared: list[Pair] = []
    for metric in systems[0].metrics:
        found = [compare(one.per_query(metric), other.per_query(metric)) for one, other in pairs]
        t_tests, randomisations = holm([c.t_test for c in found]), holm([c.randomisation for c in found])
        compared += [
            Pair(
                system=one.name,
                baseline=other.name,
                metric=metric,
                comparison=comparison,
                t_test=t_test,
                randomisation=randomisation,
            )
            for (one, other), comparison, t_test, randomisation in zip(
                pairs, found, t_tests, randomisations, strict=True
            )
        ]
    return compared


def over_runs(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each query's mean over runs with the same queries."""
    return {query: float(np.mean([of_run[query] for of_run in values])) for query in values[0]}


def deviation(values: Iterable[float]) -> float | None:
    """Returns the sample standard deviation; None for one value."""
    values = list(values)
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
