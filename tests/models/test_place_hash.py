"""Random numbers that are hashes of positions: uniform, uncorrelated, the same on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.models import attention_kernel, layers

SHAPE = (32, 64, 96)


def drawn(seed: int, rate: float = 0.1) -> np.ndarray:
    """Returns float64 numbers: 1 where dropout drops, else 0."""
    kept = layers.dropout(jnp.ones(SHAPE, jnp.float32), rate, jax.random.key(seed))
    np.testing.assert_allclose(np.unique(kept), [0.0, 1 / (1 - rate)], rtol=1e-6)
    return np.asarray(kept == 0, np.float64)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_has_its_rate_along_every_axis(rate):
    dropped = drawn(0, rate)
    for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1), (2,)):
        shares = dropped.mean(axes)
        deviation = (rate * (1 - rate) * shares.size / dropped.size) ** 0.5
        assert np.abs(shares - rate).max() < 5 * deviation
        if shares.size > 50:  # shares spread as much as by chance, neither more nor less
            assert 0.8 * deviation < shares.std() < 1.2 * deviation


def test_neighbours_and_keys_are_uncorrelated():
    dropped, limit = drawn(0), 5 / np.prod(SHAPE) ** 0.5
    others = [np.roll(dropped, shift, axis) for axis in range(3) for shift in (1, 2, 8, 16)]
    for other in (*others, *(drawn(seed) for seed in (1, 2, 3))):
        assert abs(np.corrcoef(dropped.ravel(), other.ravel())[0, 1]) < limit


@pytest.mark.parametrize("shape", [(32, 64, 1024), (64, 64, 512), (16, 128, 768)])
def test_counts_of_dropped_positions_are_binomial(shape):
    """Some widths are powers of two, where positions differ in few bits."""
    draw = jax.jit(lambda seed: (layers.dropout(jnp.ones(shape), 0.1, jax.random.key(seed)) == 0).sum(1))
    counts = np.stack([draw(seed) for seed in range(8)])
    assert abs(counts.var() / (shape[1] * 0.1 * 0.9) - 1) < 5 * (2 / counts.size) ** 0.5


def test_counts_of_weights_dropped_by_the_kernel_are_binomial():
    """Counts, for 6 texts, 12 heads and 512 tokens, in how many rows each column is dropped."""
    words = jax.lax.bitcast_convert_type(jax.random.bits(jax.random.key(0), (2,)), jnp.int32)
    text, head = (x.ravel() for x in jnp.indices((6, 12)))
    draw = jax.jit(jax.vmap(lambda t, h: (~attention_kernel.kept(*words, t, h, 512, 0.1)).sum(0)))
    counts = np.asarray(draw(text, head))
    assert abs(counts.var() / (512 * 0.1 * 0.9) - 1) < 4 * (2 / counts.size) ** 0.5
