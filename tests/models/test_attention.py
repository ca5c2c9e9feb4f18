"""Attention, compared with float64 loops: every feature, and combinations of features."""

import functools
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.models import stacks
from jaxir.models.attention import NO_WINDOW, Attention, attention, rope_frequencies, rotate

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def numbers_whatever_ran_before(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RNG", np.random.default_rng(0))


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def slow(query, key, value, *, mask, bias, scale, causal=False, window=None):
    """Computes attention by its definition, number by number, in float64."""
    (rows, targets, heads, _), (_, sources, groups, _) = query.shape, key.shape
    out = np.zeros(query.shape)
    for b, t, h in itertools.product(range(rows), range(targets), range(heads)):
        g = h // (heads // groups)
        logits = {}
        for s in range(sources):
            far = window is not None and abs(t - s) > window
            if not mask[b, s] or far or (causal and s > t):
                continue
            logits[s] = scale * sum(
                float(q) * float(k) for q, k in zip(query[b, t, h], key[b, s, g], strict=True)
            )
            logits[s] += 0.0 if bias is None else float(bias[0, h, t, s])
        total = sum(math.exp(x) for x in logits.values())
        for s, x in logits.items():
            out[b, t, h] += math.exp(x) / total * value[b, s, g]
    return out


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_attention_is_its_definition(causal, window, groups, has_bias):
    query, (key, value) = normal(2, 7, 4, 3), (normal(2, 7, groups, 3) for _ in range(2))
    bias = normal(1, 4, 7, 7) if has_bias else None
    mask = np.arange(7)[None] < np.array([[7], [5]])
    kinds = {"mask": mask, "bias": bias, "scale": 0.6, "causal": causal, "window": window}
    expected = slow(query, key, value, **kinds)
    found = attention(*map(jnp.asarray, (query, key, value)), **jax.tree.map(_array, kinds))
    real = mask[:, :, None, None]  # ignore padded queries, which may see no key
    np.testing.assert_allclose(np.where(real, found, 0), np.where(real, expected, 0), atol=2e-6)
    assert np.isfinite(found).all()
    # A dropout rate near 0 drops nothing, but selects another code path.
    dropping = {"dropout_rate": 1e-9, "dropout_key": jax.random.key(0)}
    again = attention(*map(jnp.asarray, (query, key, value)), **jax.tree.map(_array, kinds), **dropping)
    np.testing.assert_allclose(again, found, atol=2e-6)


def _array(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def test_path_of_float32_on_tpus_is_the_definition(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    query, key, value, bias = (normal(*s) for s in ((2, 6, 4, 3), *[(2, 6, 1, 3)] * 2, (1, 4, 6, 6)))
    mask = np.arange(6)[None] < np.array([[6], [4]])
    kinds = {"mask": mask, "bias": bias, "scale": 0.6, "causal": True, "window": 2}
    found = jax.jit(lambda *given: attention(*given, **jax.tree.map(_array, kinds)))(query, key, value)
    real = mask[:, :, None, None]
    expected = slow(query, key, value, **kinds)
    np.testing.assert_allclose(np.where(real, found, 0), np.where(real, expected, 0), atol=2e-6)


@pytest.mark.parametrize(("targets", "sources"), [(5, 1), (3, 8)])
def test_cross_attention_is_its_definition(targets, sources):
    query, (key, value) = normal(2, targets, 4, 3), (normal(2, sources, 2, 3) for _ in range(2))
    bias = normal(1, 4, targets, sources)
    mask = np.arange(sources)[None] < np.array([[sources], [max(1, sources - 3)]])
    kinds = {"mask": mask, "bias": bias, "scale": 1.0}
    found = attention(*map(jnp.asarray, (query, key, value)), **jax.tree.map(_array, kinds))
    np.testing.assert_allclose(found, slow(query, key, value, **kinds), atol=2e-6)
    with pytest.raises(ValueError, match="keys need `start`"):
        attention(*map(jnp.asarray, (query, key, value)), **jax.tree.map(_array, kinds), causal=True)


def test_rope_rotates_pairs_by_the_angle_of_their_position():
    x, frequencies = normal(1, 6, 2, 8), rope_frequencies(8, 100.0)
    np.testing.assert_allclose(frequencies, [100.0 ** (-2 * i / 8) for i in range(4)], rtol=1e-6)
    found = np.asarray(rotate(jnp.asarray(x), frequencies))
    for position, head, i in itertools.product(range(6), range(2), range(4)):
        turn = np.exp(1j * position * 100.0 ** (-2 * i / 8))
        expected = complex(x[0, position, head, i], x[0, position, head, i + 4]) * turn
        pair = found[0, position, head, i] + 1j * found[0, position, head, i + 4]
        np.testing.assert_allclose(pair, expected, atol=1e-5)
    shifted = np.asarray(rotate(jnp.asarray(np.roll(x, 2, axis=1)), frequencies))
    dot = lambda y, s, t: (y[0, s] * y[0, t]).sum()  # noqa: E731
    # Logits depend only on distances.
    np.testing.assert_allclose(dot(found, 1, 3), dot(shifted, 3, 5), atol=1e-4)


def make(**settings) -> Attention:
    shared = {"num_heads": 4, "head_dim": 4, "stddevs": (0.5,) * 4, "dtype": "float32", "rngs": nnx.Rngs(0)}
    return Attention(16, **shared | settings)


class _Block(nnx.Module):
    """Attention whose window and angles differ between layers."""

    def __init__(self, rngs):
        self.attention = make(num_kv_heads=2, rngs=rngs)

    def __call__(self, x, mask, bias, window, frequencies, *, key):
        return x + self.attention(x, mask, bias=bias, window=window, frequencies=frequencies, key=key)


def test_scanned_layers_have_their_own_windows_and_angles():
    windows = np.array([NO_WINDOW, 1, 2], np.int32)
    frequencies = np.stack([rope_frequencies(4, base) for base in (1e4, 10.0, 100.0)])
    mask, x = jnp.arange(6)[None] < jnp.array([[6], [4]]), normal(2, 6, 16)
    bias = jnp.asarray(normal(1, 4, 6, 6))
    results = []
    for scan, remat in itertools.product((False, True), repeat=2):
        graph, state = nnx.split(stacks.make_stack(_Block, 3, scan=scan, rngs=nnx.Rngs(0)))

        def run(state, x, per_layer, graph=graph, remat=remat):
            args = [(mask, bias)]
            blocks = nnx.merge(graph, state)
            (y,) = stacks.run_stack(blocks, [x], args, remat=remat, keys=[None], per_layer=per_layer)
            return jnp.where(mask[..., None], jnp.sin(y), 0.0).sum()

        run = jax.jit(jax.value_and_grad(run, argnums=1))
        results.append(run(state, jnp.asarray(x), (windows, frequencies)))
        other, _ = run(state, jnp.asarray(x), (windows[::-1], frequencies[::-1]))
        assert abs(results[-1][0] - other) > 1e-2  # each layer uses its own window and frequencies
    for value, gradient in results[1:]:
        np.testing.assert_allclose(value, results[0][0], rtol=1e-5)
        np.testing.assert_allclose(gradient, results[0][1], atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "window", "has_bias", "has_rope"), [(2, None, True, False), (1, 2, False, True)]
)
def test_cached_attention_in_pieces_equals_whole_attention(groups, window, has_bias, has_rope):
    length = 7
    module = make(num_kv_heads=groups)
    x = jnp.asarray(normal(2, length, 16))
    bias = jnp.asarray(normal(1, 4, length, length)) if has_bias else None
    more = {"window": window, "frequencies": jnp.asarray(rope_frequencies(4, 100.0)) if has_rope else None}
    mask = jnp.ones((2, length), bool)
    whole = nnx.jit(lambda module, x: module(x, mask, bias=bias, causal=True, key=None, **more))(module, x)
    graph, state = nnx.split(module)

    @functools.partial(jax.jit, static_argnums=2)
    def piece(cache, x, size):
        start = cache.filled
        part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
        own = None if bias is None else jax.lax.dynamic_slice_in_dim(bias, start, size, axis=2)
        return nnx.merge(graph, state).extend(part, cache, bias=own, **more)

    # The cache starts with 100 everywhere: positions that are not filled yet must have no effect.
    start = jax.tree.map(lambda a: jnp.full_like(a, 100.0 if a.ndim else 0), module.empty_cache(2, length))
    for sizes in ([1] * length, [3, 1, 3], [length]):
        cache, found = start, []
        for size in sizes:
            y, cache = piece(cache, x, size)
            found.append(y)
        assert cache.filled == length
        np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=2e-6)


def test_cudnn_is_not_used_for_a_memory(monkeypatch):
    """cuDNN takes one length for queries and keys, so it would apply the memory's padding to the queries."""
    module = make(num_heads=2, head_dim=8, dtype="bfloat16")
    x, memory = (jnp.asarray(normal(2, 4, 16), jnp.bfloat16) for _ in range(2))
    mask = jnp.arange(4)[None] < jnp.array([[4], [2]])
    expected = module(x, mask, memory=memory, key=None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # without a GPU cuDNN's kernel fails
    np.testing.assert_array_equal(module(x, mask, memory=memory, key=None), expected)
    np.testing.assert_array_equal(module.recall(x, module.remember(memory), mask), expected)
    with pytest.raises(Exception, match=r"(?i)cudnn"):
        module(x, mask, key=None)


@pytest.mark.parametrize("rows", [1, 2])
def test_cudnn_is_not_used_for_a_bias_of_each_text(monkeypatch, rows):
    """cuDNN computes no gradient for such a bias. With one text, it has the shape of a shared bias."""
    heads, bias = jnp.asarray(normal(rows, 4, 2, 8), jnp.bfloat16), jnp.asarray(normal(rows, 2, 4, 4))
    shared = {"mask": jnp.ones((rows, 4), bool), "scale": 0.5}
    expected = attention(heads, heads, heads, bias=bias, bias_of_text=True, **shared)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # without a GPU cuDNN's kernel fails
    found = attention(heads, heads, heads, bias=bias, bias_of_text=True, **shared)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(Exception, match=r"(?i)cudnn|bias has 2 texts"):
        attention(heads, heads, heads, bias=bias, **shared)
