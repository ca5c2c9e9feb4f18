"""Paired significance tests and confidence intervals for two systems on the same queries, by scipy."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from jaxir.core.errors import UserError

RESAMPLES = 9_999  # random swaps of a test, or bootstrap samples of an interval
# Number of random numbers that scipy draws at a time. By default it draws all at once, which takes gigabytes
# for thousands of queries.
_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of a system with a baseline by one metric, on the same queries."""

    mean: float  # the system's mean over queries
    baseline: float  # the baseline's mean over queries
    wins: int  # queries on which the system is better
    losses: int  # queries on which the system is worse; the rest are ties
    queries: int
    t_test: float  # two-sided p-value of the paired t-test
    randomisation: float  # two-sided p-value of the paired randomisation (sign-flip) test

    @property
    def difference(self) -> float:
        return self.mean - self.baseline


def compare(
    system: Mapping[str, float], baseline: Mapping[str, float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Comparison:
    """Tests whether two systems differ on one metric.

    The randomisation test swaps the two systems' values of random queries `resamples` times and counts mean
    differences that are at least as far from 0 as the observed difference (Smucker et al. 2007). With few
    queries it tries all swaps. Its smallest p-value is 2 / (resamples + 1).

    Args:
      system: query id to value.
      baseline: query id to value, for the same queries, at least two.
      seed: the seed of the random swaps.
      resamples: the number of random swaps.
    """
    from scipy import stats

    ours, theirs = _paired(system, baseline)
    differences = ours - theirs
    t_test = randomisation = 1.0
    if differences.any():
        with warnings.catch_warnings():
            # If all differences are equal, p is 0 and scipy warns of catastrophic cancellation.
            warnings.simplefilter("ignore", RuntimeWarning)
            t_test = float(stats.ttest_rel(ours, theirs).pvalue)
        randomisation = _randomisation(differences, seed, resamples)
    return Comparison(
        mean=float(ours.mean()),
        baseline=float(theirs.mean()),
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        queries=len(ours),
        t_test=t_test,
        randomisation=randomisation,
    )


def _randomisation(differences: np.ndarray, seed: int, resamples: int) -> float:
    from scipy import stats

    rng = np.random.default_rng(seed)
    if 2 ** min(len(differences), 60) <= resamples:
        how = {"permutation_type": "samples", "n_resamples": resamples, "rng": rng}
        return float(stats.permutation_test((differences,), np.mean, **how).pvalue)

    def swapped(size: tuple[int, ...]) -> np.ndarray:
        return np.where(rng.integers(2, size=size, dtype=np.uint8), differences, -differences)

    # scipy's permutation_test loops over queries in Python, which takes minutes for thousands of queries.
    test = stats.monte_carlo_test(
        differences,
        swapped,
        np.mean,
        n_resamples=resamples,
        batch=max(1, _AT_ONCE // len(differences)),
    )
    return float(test.pvalue)


def confidence_interval(
    system: Mapping[str, float],
    baseline: Mapping[str, float],
    *,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """Returns a bootstrap confidence interval, (low, high), of the mean difference of two systems.

    Queries are drawn with replacement, with both systems' values of one metric; the ends are percentiles.
    The interval accounts for the choice of queries, not for the random seed of training.

    Args:
      system: query id to value.
      baseline: query id to value, for the same queries, at least two.
      level: the confidence level.
      seed: the seed of the bootstrap samples.
      resamples: the number of bootstrap samples.
    """
    from scipy import stats

    ours, theirs = _paired(system, baseline)
    found = stats.bootstrap(
        (ours - theirs,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, _AT_ONCE // len(ours)),
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values for multiple comparisons (Holm 1979).

    The smallest of n p-values is multiplied by n, the next by n - 1, and so on. A corrected p-value is at
    most 1, and at least the previous corrected p-value.
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = corrected[i] = max(highest, min(1.0, (len(p_values) - place) * p_values[i]))
    return corrected


def check_comparable(queries: int) -> None:
    if queries < 2:
        raise UserError("a paired test needs at least two queries: judge more queries, or compare no systems")


def _paired(system: Mapping[str, float], baseline: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    if system.keys() != baseline.keys():
        raise UserError("two systems can only be compared on the same queries: give both the same judgements")
    check_comparable(len(system))
    ours = np.array([system[query_id] for query_id in system], np.float64)
    return ours, np.array([baseline[query_id] for query_id in system], np.float64)
