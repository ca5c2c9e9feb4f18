"""Losses of lists and of a teacher's scores, compared with their equations in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses import ranking
from jaxir.losses.distillation import kl_distillation, margin_mse

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
    """Computes the loss of Chuang 2024, section 3.3.1, where M is minus the score."""
    total = 0.0
    for scores, ranks, n in zip(-SCORES.astype(np.float64), RANKS, COUNTS, strict=True):
        for i in range(n):
            for j in range(n):
                if ranks[i] < ranks[j]:
                    total += max(0.0, scores[i] - scores[j] + (ranks[j] - ranks[i]) * alpha)
    return total / len(SCORES)


def by_their_code(alpha):
    """Sorts by rank, takes the mean over pairs of each distance, then the mean over distances."""
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


B, N, D = 5, 3, 4  # queries, negatives of each, width


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    shapes = {"query": (B, D), "passage": (B, D), "negatives": (B, N, D)}
    shapes |= {"passage_score": (B,), "negative_scores": (B, N)}
    return {name: jnp.array(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def similarity(arrays, i, c):
    """Similarity of row i's query with its positive (c = 0) or its negative c - 1."""
    other = arrays["passage"][i] if c == 0 else arrays["negatives"][i, c - 1]
    return float(np.dot(np.float64(arrays["query"][i]), np.float64(other)))


def taught(arrays, i, c):
    return float(arrays["passage_score"][i] if c == 0 else arrays["negative_scores"][i, c - 1])


def test_margin_mse(arrays):
    loss, metrics = margin_mse(**arrays, temperature=1 / 3)
    errors, agree = [], []
    for i in range(B):
        for c in range(1, N + 1):
            margin = 3 * (similarity(arrays, i, 0) - similarity(arrays, i, c))
            wanted = taught(arrays, i, 0) - taught(arrays, i, c)
            errors.append((margin - wanted) ** 2)
            agree.append((margin > 0) == (wanted > 0))
    assert float(loss) == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert float(metrics["agreement"]) == pytest.approx(sum(agree) / len(agree))
    assert 0 < sum(agree) < len(agree)


def test_kl_distillation(arrays):
    loss, metrics = kl_distillation(**arrays, temperature=0.5, teacher_temperature=2.0)
    total, first = 0.0, []
    for i in range(B):
        ours = [math.exp(similarity(arrays, i, c) / 0.5) for c in range(N + 1)]
        theirs = [math.exp(taught(arrays, i, c) / 2.0) for c in range(N + 1)]
        for q, p in zip(ours, theirs, strict=True):
            total += p / sum(theirs) * math.log(p / sum(theirs) / (q / sum(ours)))
        first.append(np.argmax(ours) == np.argmax(theirs))
    assert float(loss) == pytest.approx(total / B, rel=1e-5)
    assert float(metrics["agreement"]) == pytest.approx(sum(first) / B)


@pytest.mark.parametrize("loss", [margin_mse, kl_distillation])
def test_loss_is_zero_at_the_teachers_scores(arrays, loss):
    scores = jnp.array([[similarity(arrays, i, c) for c in range(N + 1)] for i in range(B)], jnp.float32)
    same = {"passage_score": scores[:, 0], "negative_scores": scores[:, 1:]}
    least, metrics = loss(**arrays | same, temperature=1.0)
    assert abs(float(least)) < 1e-6 and float(metrics["agreement"]) == 1
    more, slopes = jax.value_and_grad(lambda x: loss(**arrays | x, temperature=1.0)[0])(
        {name: arrays[name] for name in ("query", "passage", "negatives")}
    )
    assert more > 0.1 and all(np.abs(slope).max() > 1e-3 for slope in slopes.values())
