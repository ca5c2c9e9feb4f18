"""Losses of word distributions, compared with Ma et al. 2022's equations in float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.costs import collectives, hlo
from jaxir.losses.word_distributions import bag_of_words, js_divergences, js_softmax, log_normalised_sigmoid
from jaxir.runtime.partitioning import MeshConfig


def logits(rows, words=50, scale=3.0, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, (rows, words)), jnp.float32)


@functools.partial(jax.jit, static_argnames="temperature")
def contrast(first, second, **settings):
    return js_softmax(*map(log_normalised_sigmoid, (first, second)), **settings)


def distribution(z):
    """Equation 3, divided by its sum."""
    with np.errstate(over="ignore"):  # sigmoid(-1000) is 0
        found = 1 / (1 + np.exp(-np.asarray(z, np.float64)))
    return found / found.sum(-1, keepdims=True)


def js(p, q):
    """Lin 1991: the entropy of the mean minus the mean of the entropies."""

    def entropy(p):
        return -sum(x * np.log(x) for x in p if x > 0)

    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def equation_5(first, second, kept=lambda i, k: True, temperature=1.0):
    everything = np.concatenate([first, second])
    total = 0.0
    for i, p in enumerate(first):
        own = np.exp(-js(p, second[i]) / temperature)
        others = [
            np.exp(-js(p, q) / temperature)
            for k, q in enumerate(everything)
            if k != i and (k == len(first) + i or kept(i, k % len(first)))
        ]
        total -= np.log(own / sum(others))
    return total / len(first)


def test_bag_of_words_is_equation_4():
    z, rng = logits(6), np.random.default_rng(1)
    y, w = rng.random((6, 50)) < 0.2, rng.random(50).astype(np.float32)
    p = 1 / (1 + np.exp(-np.asarray(z, np.float64)))
    terms = -(y * np.log(p) + (1 - y) * np.log(1 - p))
    loss, metrics = bag_of_words(z, jnp.asarray(y))
    np.testing.assert_allclose(loss, terms.sum(1).mean(), rtol=1e-6)
    assert metrics["word_recall"] == pytest.approx((p > 0.5)[y].mean())
    np.testing.assert_allclose(
        bag_of_words(z, jnp.asarray(y), weights=jnp.asarray(w))[0], (w * terms).sum(1).mean(), rtol=1e-6
    )
    far = jnp.full((1, 4), 200.0)  # logits at which log(1 - sigmoid) would be -inf
    assert bag_of_words(far, jnp.asarray([[True, True, True, False]]))[0] == 200


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_js_softmax_is_equation_5(temperature):
    first, second = logits(5), logits(5, seed=1) + 2 * logits(5)
    loss, metrics = contrast(first, second, temperature=temperature)
    p, q = distribution(first), distribution(second)
    np.testing.assert_allclose(loss, equation_5(p, q, temperature=temperature), rtol=1e-5)
    own = np.mean([js(a, b) for a, b in zip(p, q, strict=True)])
    assert metrics["positive_divergence"] == pytest.approx(own, abs=1e-6) and metrics["accuracy"] == 1
    assert metrics["rows_without_negatives"] == 0


def test_texts_with_equal_keys_are_not_negatives():
    first, second = logits(5), logits(5, seed=1)
    key = jnp.asarray([[1, 1], [2, 2], [1, 1], [3, 3], [2, 2]], jnp.int32)
    loss, _ = contrast(first, second, key=key)
    same = (np.asarray(key)[:, None] == np.asarray(key)).all(-1)
    expected = equation_5(distribution(first), distribution(second), lambda i, k: not same[i, k])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert loss < contrast(first, second, temperature=1.0)[0] - 0.1
    alone = contrast(first[:1], second[:1])
    assert alone[0] == 0 and alone[1]["rows_without_negatives"] == 1


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0, 300.0])
def test_divergences_and_gradients_at_small_probabilities(scale):
    """Probabilities go from nearly uniform ones to those that float32 rounds to 0; float64 is exact."""
    first, second = logits(4, 300, scale), logits(6, 300, scale, seed=1)
    second = second.at[0].set(first[0])
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(4, 6)), jnp.float32)

    def total(first, second):
        found = js_divergences(*map(log_normalised_sigmoid, (first, second)))
        return (weights * found).sum(), found

    (_, found), slopes = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(first, second)
    p, q = distribution(first), distribution(second)
    expected = np.array([[js(a, b) for b in q] for a in p])
    np.testing.assert_allclose(found, expected, atol=3e-7, rtol=1e-5)
    assert found[0, 0] == 0 and np.min(found) >= 0 and np.max(found) <= np.log(2) + 1e-6

    def numpy_slope(z, p, q, weights):
        """Returns d/dz sum_k w_k JS(p(z), q_k), by the chain rule for log p, the sigmoid and its sum."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            by_log_p = sum(
                w * np.nan_to_num(p * (np.log(p) - np.log((p + b) / 2))) / 2
                for w, b in zip(weights, q, strict=True)
            )
            return (by_log_p - p * by_log_p.sum()) / (1 + np.exp(np.asarray(z, np.float64)))

    for i in range(4):
        hand = numpy_slope(first[i], p[i], q, np.asarray(weights[i], np.float64))
        np.testing.assert_allclose(slopes[0][i], hand, atol=1e-7)
    for k in range(6):
        hand = numpy_slope(second[k], q[k], p, np.asarray(weights[:, k], np.float64))
        np.testing.assert_allclose(slopes[1][k], hand, atol=1e-7)
    if scale < 300:
        assert np.abs(slopes[0]).max() > 1e-6


def loss_of(first, second):
    return js_softmax(*map(log_normalised_sigmoid, (first, second)))[0]


def test_meshes_change_no_number():
    first, second = logits(8, 64), logits(8, 64, seed=1)
    plain = jax.jit(jax.value_and_grad(loss_of, (0, 1)))(first, second)
    for mesh in ({"data": 4}, {"data": 1, "tensor": 4}, {"fsdp": 2, "data": 1, "tensor": 2}):
        partitioner = MeshConfig(**mesh).build()
        with partitioner():
            compiled = jax.jit(jax.value_and_grad(loss_of, (0, 1))).lower(first, second).compile()
        sent = collectives.read(hlo.parse(compiled.as_text()), partitioner.mesh)
        words = [c for c in sent if any(64 in array.shape for array in c.arrays)]
        if mesh == {"data": 4}:  # each side's words travel once, and so do their gradients
            assert words and max(c.count for c in words) <= 2, words
        found = compiled(first, second)
        np.testing.assert_allclose(found[0], plain[0], rtol=1e-6)
        for one, other in zip(found[1], plain[1], strict=True):
            assert np.abs(other).max() > 1e-4
            np.testing.assert_allclose(one, other, atol=1e-7)


def test_no_array_of_all_pairs_and_words_exists():
    rows, words = 64, 4096
    gradient = jax.jit(jax.grad(loss_of, (0, 1)))
    compiled = gradient.lower(logits(rows, words), logits(rows, words, seed=1)).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    assert held < 20 * rows * words * 4 < rows * 2 * rows * words * 4 / 4
