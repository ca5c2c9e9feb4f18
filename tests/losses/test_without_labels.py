"""NT-Xent, margin, triplet and binary cross-entropy, compared with loops over Wang 2022's equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses.bce import bce
from jaxir.losses.hinges import margin, triplet
from jaxir.losses.nt_xent import nt_xent
from tests.losses.loss_cases import EMBEDDINGS, KEYS, duplicates, hard_negatives_of, make_case, to_jax


def sides(case):
    """Returns both sides, and for each row the other rows that are no duplicates, and its hard negatives."""
    x, y = case["query"], case["passage"]
    others = [[j for j in range(len(x)) if j != i and not duplicates(case, i, j)] for i in range(len(x))]
    return x, y, others, [list(hard_negatives_of(case, i)) for i in range(len(x))]


def expected_nt_xent(case, temperature):
    x, y, others, hard = sides(case)

    def one(own, other, i, more):
        right = np.exp(own[i] @ other[i] / temperature)
        wrong = sum(np.exp(own[i] @ z[j] / temperature) for j in others[i] for z in (x, y))
        return -np.log(right / (right + wrong + sum(np.exp(own[i] @ n / temperature) for n in more)))

    return sum(one(x, y, i, hard[i]) + one(y, x, i, []) for i in range(len(x))) / (2 * len(x))


def negatives_of(case, i, same_tower):
    x, y, others, hard = sides(case)
    found = [x[i] @ y[j] for j in others[i]] + [x[i] @ n for n in hard[i]]
    return found + [x[i] @ x[j] for j in others[i]] * same_tower


def chosen(costs, choice):
    return 0.0 if not costs else max(costs) if choice == "hardest" else sum(costs) / len(costs)


def expected_margin(case, alpha, beta, choice, same_tower):
    x, y, *_ = sides(case)
    total = 0.0
    for i in range(len(x)):
        far = [max(0.0, beta - (1 - s)) for s in negatives_of(case, i, same_tower)]
        total += max(0.0, (1 - x[i] @ y[i]) - alpha) + chosen(far, choice)
    return total / len(x)


def expected_triplet(case, epsilon, choice, same_tower):
    x, y, *_ = sides(case)
    slack = [
        [max(0.0, s - x[i] @ y[i] + epsilon) for s in negatives_of(case, i, same_tower)]
        for i in range(len(x))
    ]
    return sum(chosen(costs, choice) for costs in slack) / len(x)


def expected_bce(case, temperature, g):
    x, y, *_ = sides(case)

    def probability(s):
        exponent = s / temperature if g == "quotient" else np.sign(s) * abs(s) ** temperature
        return 1 / (1 + np.exp(-exponent))

    total = 0.0
    for i in range(len(x)):
        total += np.log(probability(x[i] @ y[i]))
        total += sum(np.log(1 - probability(s)) for s in negatives_of(case, i, True))
    return -total / len(x)


CASES = {
    "nt_xent": (nt_xent, expected_nt_xent, {"temperature": 0.3}),
    "bce": (bce, expected_bce, {"temperature": 0.3, "g": "quotient"}),
    "bce as printed": (bce, expected_bce, {"temperature": 0.3, "g": "power"}),
    **{
        f"{loss.__name__} {choice} {same}": (loss, expected, more | {"choice": choice, "same_tower": same})
        for loss, expected, more in (
            (margin, expected_margin, {"alpha": 0.2, "beta": 0.9}),
            (triplet, expected_triplet, {"epsilon": 0.4}),
        )
        for choice in ("hardest", "mean")
        for same in (False, True)
    },
}


@pytest.mark.parametrize("keys", [(), ("query_key",), KEYS], ids="+".join)
@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_equation(name, negatives, keys):
    loss, expected, settings = CASES[name]
    case = make_case(negatives=negatives)
    case = {k: v for k, v in case.items() if k in EMBEDDINGS or k in keys}
    value, metrics = loss(**to_jax(case), **settings)
    assert value.dtype == jnp.float32 and value > 0.01
    np.testing.assert_allclose(value, expected(case, **settings), rtol=2e-5)
    assert all(np.isfinite(m) and m.dtype == jnp.float32 and m.shape == () for m in metrics.values())
    assert {"accuracy", "positive_similarity", "rows_without_negatives"} <= metrics.keys()


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences(name):
    loss, _, settings = CASES[name]
    case = to_jax({k: v for k, v in make_case(negatives=2).items() if k in EMBEDDINGS})
    function = functools.partial(loss, **settings)
    gradients = jax.grad(lambda case: function(**case)[0])(case)
    rng = np.random.default_rng(1)
    for side, gradient in gradients.items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-4, side
        direction = jnp.asarray(rng.normal(size=gradient.shape), jnp.float32)
        ends = [function(**case | {side: case[side] + step * direction})[0] for step in (1e-3, -1e-3)]
        slope = float(ends[0] - ends[1]) / 2e-3
        np.testing.assert_allclose(float((gradient * direction).sum()), slope, rtol=0.03, atol=2e-3)


def test_power_has_a_finite_gradient_at_orthogonal_texts():
    eye = jnp.eye(3, dtype=jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: bce(x, eye, temperature=0.05, g="power")[0]))(eye)
    assert np.isfinite(gradient).all()


def test_a_batch_without_negatives_costs_nothing():
    """All texts of the batch are duplicates of each other."""
    key = jnp.ones((3, 2), jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    for loss in (nt_xent, triplet):
        value, metrics = loss(x, x, query_key=key, passage_key=key)
        assert value == 0.0 and metrics["rows_without_negatives"] == 1.0
