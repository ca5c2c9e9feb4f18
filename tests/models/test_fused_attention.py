"""TPU kernels of attention, interpreted: values and gradients are those of the definition, also on meshes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.costs import work
from jaxir.models import attention_kernel, fused_attention
from jaxir.models.attention import attention, rope_frequencies
from jaxir.models.attention_kernel import Kind
from jaxir.models.layers import RMSNorm
from jaxir.models.t5 import T5Config
from jaxir.runtime.partitioning import MeshConfig, Partitioner

RNG = np.random.default_rng(0)
ROWS, LENGTH, HEADS = 4, 16, 4
# Full texts, padded texts, and a text of one token.
MASK = np.arange(LENGTH)[None] < np.array([16, 9, 1, 12])[:, None]
KEY = jax.random.key(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def definition(
    query, key, value, bias=None, *scales, scale, causal=False, window=None, kept=None, rate=0.0, base=None
):
    """Returns attention [B, L, H, K] by its definition; dropout keeps the weights `kept` [B, H, T, S]."""
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    if scales:
        query, key, value = (
            x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 if s is None else s[None, None, None])
            for x, s in zip((query, key, value), (*scales, None), strict=True)
        )
    if base:
        angles = np.arange(LENGTH)[:, None] * base ** -(np.arange(0, 1, 2 / query.shape[3]))
        turn = np.exp(1j * angles)[None, :, None].astype(np.complex64)
        query, key = (jnp.concatenate(parts, axis=-1) for parts in (turned(x, turn) for x in (query, key)))
    key, value = (jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (key, value))
    logits = scale * jnp.einsum("bthk,bshk->bhts", query, key)
    logits = logits if bias is None else logits + bias
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None]
    near = jnp.ones_like(distance, bool) if window is None else abs(distance) <= window
    near = near & (distance >= 0) if causal else near
    weights = jax.nn.softmax(jnp.where(MASK[:, None, None] & near[None, None], logits, -1e9), axis=-1)
    weights = weights if kept is None else jnp.where(kept, weights / (1.0 - rate), 0.0)
    return jnp.einsum("bhts,bshk->bthk", weights, value)


def turned(x, turn):
    pairs = jax.lax.complex(*jnp.split(x, 2, axis=-1)) * turn
    return pairs.real, pairs.imag


@functools.cache
def what_is_kept(rate: float, for_all: bool) -> jax.Array:
    """Returns True for each weight [B, H, T, S] that dropout with KEY keeps."""
    words = jax.lax.bitcast_convert_type(jax.random.bits(KEY, (2,)), jnp.int32)

    def one(text, head):
        of = attention_kernel.values_kept if for_all else attention_kernel.kept
        kept = of(*words, text, head, LENGTH, rate)
        return jnp.broadcast_to(kept.T, (LENGTH, LENGTH)) if for_all else kept

    many = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))
    return many(jnp.arange(ROWS), jnp.arange(HEADS)).swapaxes(2, 3)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, arrays, cotangent):
    """Returns the value and all gradients; values and cotangents of padding are set to 0."""
    value, back = jax.vjp(function, *arrays)
    real = MASK[:, :, None, None]
    return jnp.where(real, value, 0), *back(jnp.where(real, cotangent, 0).astype(value.dtype))


ONE, BATCH, BOTH = {}, {"fsdp": 2, "data": 2}, {"tensor": 2, "data": 2}
CASES = {
    "t5": ({"scale": 1.0, "has_bias": True}, ONE),
    "t5, sharded": ({"scale": 1.0, "has_bias": True, "rate": 0.3, "for_all": True}, BOTH),
    "bert, sharded": ({"scale": 0.125, "rate": 0.3}, BOTH),
    "minilm": ({"scale": 32**-0.5, "dim": 32}, BATCH),
    "modernbert": ({"scale": 0.125, "window": 3}, BATCH),
    "qwen3": ({"scale": 128**-0.5, "dim": 128, "causal": True, "kv_heads": 2, "base": 1e4}, BOTH),
    "embedding gemma": (
        {"scale": 0.0625, "dim": 256, "kv_heads": 2, "window": 5, "normed": True, "base": 100.0},
        BOTH,
    ),
    "one head of keys": ({"scale": 0.04, "dim": 512, "kv_heads": 1, "normed": True, "base": 100.0}, BATCH),
    "wide": ({"scale": 0.3, "has_bias": True, "dim": 128, "rate": 0.3, "causal": True, "window": 5}, BOTH),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_definition(case):
    (how, mesh), rate = CASES[case], CASES[case][0].get("rate", 0.0)
    has_bias, dim = how.get("has_bias", False), how.get("dim", 64)
    heads = (HEADS, *[how.get("kv_heads", HEADS)] * 2)
    arrays = [jnp.asarray(normal(ROWS, LENGTH, n, dim)) for n in heads]
    arrays[0] *= 0.3
    arrays += [jnp.asarray(normal(1, HEADS, LENGTH, LENGTH))] if has_bias else []
    cotangent = jnp.asarray(normal(*arrays[0].shape))
    for_all = how.get("for_all", False)
    more = {k: v for k, v in how.items() if k not in ("has_bias", "dim", "for_all", "kv_heads", "normed")}
    is_normed, base = how.get("normed", False), how.get("base")
    if is_normed:
        arrays += [None, *(jnp.asarray(1 + 0.1 * normal(dim)) for _ in range(2))]
    expected = functools.partial(definition, kept=what_is_kept(rate, for_all) if rate else None, **more)
    given = {"mask": jnp.asarray(MASK), "scale": how["scale"], "causal": how.get("causal", False)}
    given |= {"dropout_rate": rate, "drop_for_all": for_all, "dropout_key": KEY if rate else None}
    given["window"] = jnp.int32(how["window"]) if "window" in how else None
    partitioner = MeshConfig(**mesh).build(jax.devices()[: 4 if mesh else 1])

    def found(query, key, value, bias=None, *scales):
        norms = [RMSNorm(dim, epsilon=1e-6, dtype="float32", scaled=i < 2) for i in range(3)]
        for norm, scale in zip(norms, scales, strict=False):
            norm.scale[...] = scale
        mapped = {"norms": norms if scales else (None,) * 3}
        mapped |= {"frequencies": jnp.asarray(rope_frequencies(dim, base)) if base else None}
        return fused_attention.attend(
            query, key, value, bias=bias, partitioner=partitioner, **given, **mapped
        )

    wanted = with_gradients(expected, arrays, cotangent)
    got = with_gradients(found, arrays, cotangent)
    # The tolerances allow for sums of at most 16 x 128 float32 numbers of size 1.
    names = ("out", "query", "key", "value", *["bias"] * has_bias, "query scale", "key scale")
    got, wanted = ([x for x in of if x is not None] for of in (got, wanted))
    for name, a, b in zip(names, got, wanted, strict=False):
        assert np.abs(b).max() > 0.1, name
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5, err_msg=name)
    assert len(got) == len(wanted) == 4 + has_bias + 2 * is_normed
    if rate:
        without = jax.jit(functools.partial(definition, **more))(*arrays)
        assert np.abs(np.where(MASK[:, :, None, None], without - got[0], 0)).max() > 0.1


@pytest.fixture
def as_on_tpus(monkeypatch):
    """Uses the kernels on this CPU, which interprets them."""
    monkeypatch.setattr(Partitioner, "on_tpu", True)


def test_bfloat16_is_as_near_as_without_kernels(as_on_tpus):
    arrays = [jnp.asarray(normal(ROWS, LENGTH, HEADS, 64), jnp.bfloat16) for _ in range(3)]
    arrays += [jnp.asarray(normal(1, HEADS, LENGTH, LENGTH))]
    cotangent = jnp.asarray(normal(*arrays[0].shape))
    shared = {"mask": jnp.asarray(MASK), "scale": 0.125}

    def run(query, key, value, bias, *, partitioner):
        with partitioner():
            return attention(query, key, value, bias=bias, **shared)

    wanted = with_gradients(functools.partial(definition, scale=0.125), arrays, cotangent)
    fused = MeshConfig(**BOTH).build()
    by_kernel, by_xla = (
        with_gradients(functools.partial(run, partitioner=p), arrays, cotangent)
        for p in (fused, dataclasses.replace(fused, fused_attention=False))
    )
    assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(by_kernel, by_xla, strict=True))
    for a, b, c in zip(by_kernel, by_xla, wanted, strict=True):
        assert a.dtype == b.dtype
        off = [np.linalg.norm(np.asarray(x, np.float32) - np.asarray(c, np.float32)) for x in (a, b)]
        assert 0 < off[0] < 1.25 * off[1]
        # The bound is the relative error of numbers with eight bits, such as bfloat16.
        assert off[1] < 2**-7 * np.linalg.norm(np.asarray(c, np.float32))


def test_an_encoder_trains_with_kernels_under_any_remat(as_on_tpus):
    """T5 on a mesh that splits texts and heads gives the same with kernels as without."""
    ids = jnp.asarray(np.where(MASK, RNG.integers(1, 50, MASK.shape), 0), jnp.int32)
    whole = MeshConfig(**BOTH).build()

    def program(remat, partitioner):
        config = T5Config(
            vocab_size=50, embed_dim=32, num_layers=2, num_heads=HEADS, head_dim=64, mlp_dim=64,
            dtype="bfloat16", remat=remat, scan_layers=True,
        )  # fmt: skip
        graphdef, params = nnx.split(config.make(rngs=nnx.Rngs(0)), nnx.Param)[:2]

        def loss(params):
            with partitioner():
                y = nnx.merge(graphdef, params)(ids)
            return jnp.where(MASK[..., None], y.astype(jnp.float32), 0).var()

        return jax.jit(jax.value_and_grad(loss)).trace(params), params

    def kernels(traced):
        return len(list(kernels_in(traced.jaxpr.jaxpr)))

    by_kernels = {remat: program(remat, whole) for remat in (False, "products", True)}
    # Kernels in the bodies of scans over layers: forward, backward, and forward again if it is recomputed.
    assert [kernels(of) for of, _ in by_kernels.values()] == [2, 2, 3]
    written_out = program(True, dataclasses.replace(whole, fused_attention=False))
    assert kernels(written_out[0]) == 0
    found, expected = (of.lower().compile()(params) for of, params in (by_kernels["products"], written_out))
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=0.01)
    for (path, a), b in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(expected[1]), strict=True):
        scale = np.abs(b).max()
        assert scale > 0, path
        np.testing.assert_allclose(a / scale, b / scale, atol=0.05, err_msg=str(path))


def kernels_in(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in work._subprograms(equation.params):
                yield from kernels_in(inner)


def test_fused_dropout_masks_have_the_rate_and_are_uncorrelated():
    rate, length = 0.1, 256
    kept = jax.jit(lambda *at: attention_kernel.kept(*map(jnp.int32, at), length, rate))
    places = ((1, 2, 0, 0), (1, 2, 0, 1), (1, 2, 1, 0), (3, 2, 0, 0), (1, 3, 0, 0))
    masks = [np.asarray(kept(*at)) for at in places]
    for mask in masks:
        deviation = math.sqrt(rate * (1 - rate) / length)
        assert mask.mean() == pytest.approx(1 - rate, abs=5 * deviation / math.sqrt(length))
        for axis in (0, 1):
            means = mask.mean(axis)
            assert np.abs(means - (1 - rate)).max() < 5 * deviation
            assert means.std() == pytest.approx(deviation, rel=0.25)
        pairs = [(np.roll(mask, by, axis), mask) for axis in (0, 1) for by in (1, 2, length // 2)]
        pairs += [(other, mask) for other in masks if other is not mask] + [(mask.T, mask)]
        for a, b in pairs:
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / length


@pytest.mark.parametrize(
    ("shape", "more", "taken"),
    [
        ((4, 64, 4, 64), {}, True),
        ((4, 512, 2, 128), {}, True),
        ((4, 64, 8, 32), {}, True),
        ((4, 64, 4, 64), {"dtype": jnp.float32}, False),
        ((4, 64, 4, 64), {"kv_heads": 2}, True),
        ((4, 64, 4, 64), {"kv_heads": 3}, False),
        ((4, 64, 4, 64), {"fused": False}, False),
        ((4, 1024, 4, 64), {}, False),
        ((4, 40, 4, 64), {}, False),
        ((4, 64, 4, 80), {}, False),
        ((4, 64, 2, 64), {}, False),  # each device's single head fills half of a register
        ((4, 64, 4, 256), {}, True),
        ((4, 256, 4, 512), {"kv_heads": 1}, True),
        ((4, 512, 8, 512), {"kv_heads": 2}, False),  # too large for a chip's memory
    ],
)
def test_kernels_are_used_for_supported_shapes_only(as_on_tpus, shape, more, taken):
    partitioner = MeshConfig(tensor=2, fused_attention=more.get("fused", True)).build()
    query = jax.ShapeDtypeStruct(shape, more.get("dtype", jnp.bfloat16))
    key = jax.ShapeDtypeStruct((*shape[:2], more.get("kv_heads", shape[2]), shape[3]), query.dtype)
    assert fused_attention.takes(query, key, partitioner) == taken


def test_kernels_are_not_used_on_other_machines():
    query = jax.ShapeDtypeStruct((4, 64, 4, 64), jnp.bfloat16)
    assert not fused_attention.takes(query, query, MeshConfig().build())
    assert not fused_attention.takes(query, query, None)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize(
    ("length", "has_bias", "more", "operations"),
    [
        (256, True, {}, (8, 14.5)),
        (64, True, {"dropout_rate": 0.1, "drop_for_all": True}, (14, 29)),
        (128, False, {"windowed": True, "scale": 0.3}, (10, 18)),
        (256, False, {"dropout_rate": 0.1}, (16.25, 22.5)),
    ],
)
def test_kernels_report_their_cost(length, has_bias, more, operations, backward):
    """Plans use the cost. The `operations` of each logit, in both passes, were counted in traced kernels."""
    texts, heads, dim = 16, 4, 64
    kind = Kind(head_dim=dim, **({"scale": 1.0} | more))
    x = jax.ShapeDtypeStruct((texts, length, heads * dim), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((heads, length, length), jnp.float32) if has_bias else None
    integers = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (texts, 5)]
    sums = jax.ShapeDtypeStruct((texts, heads // 2, 2, length), jnp.float32)
    function, rest = (attention_kernel.backward, (sums, x)) if backward else (attention_kernel.forward, ())
    jaxpr = jax.make_jaxpr(functools.partial(function, kind=kind))(x, x, x, bias, *integers, *rest).jaxpr
    (kernel,) = kernels_in(jaxpr)
    reported, logits = kernel.params["cost_estimate"], texts * heads * length**2
    assert reported.flops == 2 * (5 if backward else 2) * logits * dim
    assert int(kernel.params["metadata"]["elementwise"]) == operations[backward] * logits
    arguments = (x, x, x, bias, *integers, *rest)
    results = jax.eval_shape(functools.partial(function, kind=kind), *arguments)
    moved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((arguments, results)))
    assert reported.bytes_accessed == moved
