"""Losses of lists against numpy transcriptions of their equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses import ranking

rng = np.random.default_rng(0)
POSITIVE = rng.normal(size=4).astype(np.float32)
NEGATIVES = rng.normal(size=(4, 3)).astype(np.float32)
KEPT = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 0]], bool)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def pointwise(weight):
    terms = [-weight * np.log(sigmoid(s)) for s in POSITIVE]
    terms += [-np.log(1 - sigmoid(s)) for s in NEGATIVES[KEPT]]
    return np.sum(terms) / len(terms)


def listwise(temperature):
    def one(positive, negatives):
        scores = np.exp(np.array([positive, *negatives], np.float64) / temperature)
        return -np.log(scores[0] / scores.sum())

    return np.mean([one(p, n[k]) for p, n, k in zip(POSITIVE, NEGATIVES, KEPT, strict=True)])


def pairwise(margin):
    differences = (POSITIVE[:, None] - NEGATIVES)[KEPT]
    return np.mean(np.maximum(0, margin - differences))


@pytest.mark.parametrize(
    ("loss", "settings", "expected"),
    [
        (ranking.binary_cross_entropy, {}, pointwise(1.0)),
        (ranking.binary_cross_entropy, {"positive_weight": 3}, pointwise(3.0)),
        (ranking.list_softmax, {}, listwise(1.0)),
        (ranking.list_softmax, {"temperature": 0.5}, listwise(0.5)),
        (ranking.margin_ranking, {}, pairwise(1.0)),
        (ranking.margin_ranking, {"margin": 0.3}, pairwise(0.3)),
    ],
)
def test_equations(loss, settings, expected):
    def of(positive, negatives):
        return loss(positive, negatives, jnp.asarray(KEPT), **settings)

    (value, metrics), gradients = jax.jit(jax.value_and_grad(of, argnums=(0, 1), has_aux=True))(
        jnp.asarray(POSITIVE), jnp.asarray(NEGATIVES)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.abs(gradients[0]).max() > 0.01 and np.abs(np.asarray(gradients[1])[KEPT]).max() > 0.01
    assert not np.asarray(gradients[1])[~KEPT].any()
    first = [(p > n[k]).all() for p, n, k in zip(POSITIVE, NEGATIVES, KEPT, strict=True)]
    assert 0 < metrics["accuracy"] < 1 and metrics["accuracy"] == np.mean(first)
    np.testing.assert_allclose(metrics["positive_score"], POSITIVE.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["negative_score"], NEGATIVES[KEPT].mean(), rtol=1e-6)


SCORES = rng.normal(size=(5, 6)).astype(np.float32)
RANKS = np.array(
    [
        [1, 101, 3, 3, 20, 101],
        [5, 5, 5, 5, 5, 5],
        [2, 1, 9, 101, 8, 7],
        [101, 1, 1, 4, 6, 2],
        [3, 2, 1, 9, 8, 7],
    ],
    np.float32,
)
COUNTS = [6, 6, 4, 5, 1]  # candidates in each list


def by_the_equation(alpha):
    """Chuang 2024, section 3.3.1, with M = - score."""
    total = 0.0
    for scores, ranks, n in zip(-SCORES.astype(np.float64), RANKS, COUNTS, strict=True):
        for i in range(n):
            for j in range(n):
                if ranks[i] < ranks[j]:
                    total += max(0.0, scores[i] - scores[j] + (ranks[j] - ranks[i]) * alpha)
    return total / len(SCORES)


def by_their_code(alpha):
    """Sorted by rank: the mean over distances of the mean over pairs."""
    total = 0.0
    for scores, ranks, n in zip(-SCORES.astype(np.float64), RANKS, COUNTS, strict=True):
        order = np.argsort(ranks[:n], kind="stable")
        m, r = scores[:n][order], ranks[:n][order]
        means = [
            np.mean([max(0.0, m[i] - m[i + d] + alpha * (r[i + d] - r[i])) for i in range(n - d)])
            for d in range(1, n)
        ]
        total += np.mean(means) if means else 0.0
    return total / len(SCORES)


@pytest.mark.parametrize("alpha", [0.01, 0.2])
@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", by_the_equation), ("by_distance", by_their_code)]
)
def test_rank_margin_equals_the_equation_and_the_authors_code(reduction, expected, alpha):
    kept = np.arange(6) < np.array(COUNTS)[:, None]

    def of(scores):
        ranks, there = jnp.asarray(RANKS), jnp.asarray(kept)
        return ranking.rank_margin(scores, ranks, there, alpha=alpha, reduction=reduction)

    (value, metrics), gradient = jax.jit(jax.value_and_grad(of, has_aux=True))(jnp.asarray(SCORES))
    np.testing.assert_allclose(value, expected(alpha), rtol=1e-5)
    gradient = np.asarray(gradient)
    assert np.isfinite(gradient).all() and not gradient[~kept].any()
    assert np.abs(gradient).max() > 0.01 and gradient[1].any() == (reduction == "by_distance")
    chosen = [r[np.argmax(s[:n])] for s, r, n in zip(SCORES, RANKS, COUNTS, strict=True)]
    least = [r[:n].min() for r, n in zip(RANKS, COUNTS, strict=True)]
    np.testing.assert_allclose(metrics["chosen_rank"], np.mean(chosen), rtol=1e-6)
    np.testing.assert_allclose(metrics["least_rank"], np.mean(least), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(np.equal(chosen, least)), rtol=1e-6)
