import itertools
import math
import tracemalloc

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.evaluation.significance import compare, confidence_interval, holm


def queries(values):
    return {f"q{i}": float(v) for i, v in enumerate(values)}


def test_by_hand_on_few_queries():
    ours, theirs = [0.9, 0.5, 0.8, 0.4, 0.7], [0.6, 0.6, 0.3, 0.2, 0.7]
    result = compare(queries(ours), queries(theirs))
    differences = np.subtract(ours, theirs)
    observed = abs(differences.mean())
    flips = [abs(np.mean(differences * signs)) for signs in itertools.product((1, -1), repeat=5)]
    assert result.randomisation == pytest.approx(np.mean([f >= observed - 1e-12 for f in flips]))
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(5))
    # Student's distribution with 4 degrees of freedom has a closed form.
    square = t * t / (1 + t * t / 4)
    below = 0.5 + 3 / 8 * math.sqrt(square) * (1 - square / 12)
    assert result.t_test == pytest.approx(2 * (1 - below)) == pytest.approx(0.1671, abs=1e-4)
    assert (result.wins, result.losses, result.queries) == (3, 1, 5)
    assert result.difference == pytest.approx(0.18)


def test_chance_is_not_significant_and_a_shift_is():
    rng = np.random.default_rng(0)
    base = rng.uniform(size=300)
    noise = compare(queries(base + rng.normal(0, 0.1, 300)), queries(base))
    shifted = compare(queries(base + rng.normal(0.03, 0.1, 300)), queries(base))
    assert noise.t_test > 0.05 and noise.randomisation > 0.05
    assert shifted.t_test < 0.01 and shifted.randomisation < 0.01
    assert shifted.randomisation == pytest.approx(shifted.t_test, abs=0.005)


def test_repeatable_and_symmetric():
    rng = np.random.default_rng(1)
    a, b = queries(rng.uniform(size=60)), queries(rng.uniform(size=60))
    assert compare(a, b) == compare(a, b)
    assert compare(b, a).difference == -compare(a, b).difference
    assert compare(a, dict(reversed(b.items()))) == compare(a, b)
    assert compare(a, b, seed=1).randomisation != compare(a, b, seed=2).randomisation


def test_degenerate_differences():
    same = compare(queries([1, 0, 1]), queries([1, 0, 1]))
    assert (same.t_test, same.randomisation, same.wins, same.losses) == (1.0, 1.0, 0, 0)
    constant = compare(queries([1, 1, 1]), queries([0, 0, 0]))
    assert constant.t_test == 0.0 and constant.randomisation == 0.25


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ({"x": 1.0, "y": 0.0}, {"x": 1.0, "z": 0.0}, "only be compared on the same queries"),
        ({"x": 1.0}, {"x": 0.0}, "needs at least two queries"),
    ],
)
def test_incomparable_systems_are_refused(a, b, sentence):
    with pytest.raises(UserError, match=sentence):
        compare(a, b)


def test_confidence_interval_by_hand():
    # Four equal differences have no spread; resamples of the differences 0 and 1 have the mean 0, 1/2 or 1.
    zeros = {f"q{i}": 0.0 for i in range(4)}
    assert confidence_interval(dict.fromkeys(zeros, 1.0), zeros) == (1.0, 1.0)
    assert confidence_interval({"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}) == (0.0, 1.0)


def test_confidence_interval_is_that_of_the_normal_distribution_for_many_queries():
    rng = np.random.default_rng(0)
    baseline = {f"q{i}": float(v) for i, v in enumerate(rng.random(400))}
    system = {q: v + float(d) for (q, v), d in zip(baseline.items(), rng.normal(0.1, 0.2, 400), strict=True)}
    low, high = confidence_interval(system, baseline)
    differences = np.array([system[q] - baseline[q] for q in baseline])
    half = 1.96 * differences.std(ddof=1) / 20
    assert low == pytest.approx(differences.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(differences.mean() + half, abs=0.1 * half)
    assert confidence_interval(system, baseline) == (low, high)
    assert confidence_interval(system, baseline, seed=1) != (low, high)
    low, high = confidence_interval(system, baseline, level=0.5)
    assert high - low == pytest.approx(2 * half * 0.6745 / 1.96, rel=0.1)
    with pytest.raises(UserError, match="the same queries"):
        confidence_interval(system, {"q0": 1.0})


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.55]) == [1.0, 1.0] and holm([0.2]) == [0.2] and holm([]) == []


def test_random_swaps_agree_with_the_exact_test_in_one_part_and_in_several(monkeypatch):
    few, none = queries(np.random.default_rng(1).normal(0.01, 1, 14)), queries(np.zeros(14))
    exact, memory = compare(few, none, resamples=2**14).randomisation, []
    for at_once in (2**26, 2**12):
        monkeypatch.setattr("jaxir.evaluation.significance._AT_ONCE", at_once)
        tracemalloc.start()
        found = compare(few, none, resamples=2**14 - 1).randomisation
        memory.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found == pytest.approx(exact, abs=0.02)
    assert memory[1] < memory[0] / 4
