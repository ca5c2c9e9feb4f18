"""Losses of lists, against transcriptions of their formulas."""

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
    assert not np.asarray(gradients[1])[~KEPT].any(), "what is left out has no gradient"
    first = [(p > n[k]).all() for p, n, k in zip(POSITIVE, NEGATIVES, KEPT, strict=True)]
    assert 0 < metrics["accuracy"] < 1 and metrics["accuracy"] == np.mean(first)
    np.testing.assert_allclose(metrics["positive_score"], POSITIVE.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["negative_score"], NEGATIVES[KEPT].mean(), rtol=1e-6)
