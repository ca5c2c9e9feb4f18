"""Means, deviations and comparisons of systems, each of which has a run for each of several seeds."""

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
    """A system (a model or method) with the scores of its runs, usually one for each random seed."""

    name: str
    scores: Sequence[RetrievalScores | AnswerScores]  # the scores of each run, by the same judgements

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, as the caller spelt them."""
        return list(self.scores[0].values)

    def mean(self, metric: str) -> float:
        """The metric's mean over the runs."""
        return float(np.mean([scores.values[metric] for scores in self.scores]))

    def deviation(self, metric: str) -> float | None:
        """The metric's sample standard deviation over the runs; None if there is one run."""
        return deviation([scores.values[metric] for scores in self.scores])

    def per_query(self, metric: str) -> dict[str, float]:
        """{Query id: mean of its values over the runs}."""
        return over_runs([scores.per_query[metric] for scores in self.scores])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A comparison of two systems by one metric, with p-values after Holm's correction.

    The correction is over all pairs of systems that are compared by this metric.
    """

    system: str
    baseline: str
    metric: str
    comparison: Comparison  # compares values averaged over runs; its p-values are not corrected
    t_test: float  # corrected p-value of the paired t-test
    randomisation: float  # corrected p-value of the paired randomisation test


def compare_systems(systems: Sequence[System], baseline: System | None) -> list[Pair]:
    """Compares each system with the baseline by each metric; without a baseline, all pairs of systems."""
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
    """Returns {query id: mean over runs}; the runs have the same queries."""
    return {query: float(np.mean([of_run[query] for of_run in values])) for query in values[0]}


def deviation(values: Iterable[float]) -> float | None:
    """Returns the sample standard deviation of the values; None if there is one value."""
    values = list(values)
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
