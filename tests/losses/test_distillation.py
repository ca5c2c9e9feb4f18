"""Distillation losses against loops over numpy scalars."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxir.losses.distillation import kl_distillation, margin_mse

B, N, D = 5, 3, 4


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
def test_gradients(arrays, loss):
    @jax.jit
    def of_vectors(query, passage, negatives):
        given = {"query": query, "passage": passage, "negatives": negatives}
        return loss(**arrays | {name: jnp.asarray(x) for name, x in given.items()})[0]

    vectors = [arrays[name] * 0.3 for name in ("query", "passage", "negatives")]
    check_grads(of_vectors, vectors, order=1, modes=["rev"], atol=3e-2, rtol=3e-2)
    gradients = jax.jit(jax.grad(of_vectors, argnums=(0, 1, 2)))(*vectors)
    assert all(np.abs(g).max() > 1e-3 for g in gradients)


@pytest.mark.parametrize("loss", [margin_mse, kl_distillation])
def test_loss_is_zero_at_the_teachers_scores(arrays, loss):
    same = {
        "passage_score": jnp.array([similarity(arrays, i, 0) for i in range(B)], jnp.float32),
        "negative_scores": jnp.array(
            [[similarity(arrays, i, c) for c in range(1, N + 1)] for i in range(B)], jnp.float32
        ),
    }
    least, metrics = loss(**arrays | same, temperature=1.0)
    assert abs(float(least)) < 1e-6 and float(metrics["agreement"]) == 1
    assert float(loss(**arrays, temperature=1.0)[0]) > 0.1
