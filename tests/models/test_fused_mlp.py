"""TPU kernels of gated feed-forward layers, interpreted: values and gradients against XLA's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.costs import work
from jaxir.models import fused_mlp, layers
from jaxir.models.adapters import Adapter, Adapters
from jaxir.models.blocks import FeedForward
from jaxir.models.llama import LlamaConfig
from jaxir.runtime.partitioning import MeshConfig, Partitioner

RNG = np.random.default_rng(0)
WIDTH, UNITS, ROWS, LENGTH = 128, 256, 8, 64
SPLIT = {"fsdp": 2}


class Layer(nnx.Module):
    """A norm and a feed-forward layer, in float32."""

    def __init__(self, activation: str, *, adapted: bool):
        rngs = nnx.Rngs(0)
        self.norm = layers.RMSNorm(WIDTH, epsilon=1e-6, dtype="float32")
        self.mlp = FeedForward(
            WIDTH, UNITS, activation=activation, stddevs=(0.1, 0.1), dtype="float32", rngs=rngs
        )
        if adapted:
            for dense in (self.mlp.wi_0, self.mlp.wi_1, self.mlp.wo):
                dense.adapter = Adapter(dense, Adapters(rank=4, alpha=8.0), rngs=rngs)
                dense.adapter.up[...] = jnp.asarray(RNG.normal(size=dense.adapter.up.shape) * 0.1)


@pytest.mark.parametrize(
    ("activation", "adapted", "added", "mesh"),
    [("silu", False, True, SPLIT), ("silu", True, True, SPLIT), ("gelu_tanh", True, False, {})],
)
def test_values_and_gradients_equal_the_layer(activation, adapted, added, mesh):
    layer = Layer(activation, adapted=adapted)
    x, cotangent = (jnp.asarray(RNG.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32) for _ in range(2))
    partitioner = MeshConfig(**mesh).build(jax.devices()[: 2 if mesh else 1])
    graphdef, state = nnx.split(layer)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    trained = {n: x for n, x in named.items() if not adapted or "adapter" in n}
    assert len(trained) == (6 if adapted else 4)

    def with_gradients(function):
        def loss(trained, x):
            leaves = list((named | trained).values())
            of = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))
            return function(of, x)

        def run(trained, x):
            with partitioner():
                y, back = jax.vjp(loss, trained, x)
                return y, back(cotangent)

        return jax.jit(run)

    def definition(of, x):
        y = of.mlp(of.norm(x), key=None)
        return x + y if added else y

    def kernels(of, x):
        return fused_mlp.run(of.mlp, of.norm, x, added=added, partitioner=partitioner)

    wanted, run = with_gradients(definition)(trained, x), with_gradients(kernels)
    found = run(trained, x)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        size = np.abs(b).max()
        assert size > 0.1, path
        np.testing.assert_allclose(a / size, b / size, atol=1e-5, err_msg=str(path))
    _, backward = kernels_in(jax.make_jaxpr(run)(trained, x).jaxpr)
    # The gradient of a frozen kernel is not computed.
    assert [v.aval.size for v in backward.outvars[1:]].count(WIDTH * UNITS) == (0 if adapted else 3)


def kernels_in(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in work._subprograms(equation.params):
                yield from kernels_in(inner)


def test_an_encoder_trains_with_kernels_as_without(monkeypatch):
    monkeypatch.setattr(Partitioner, "on_tpu", True)
    ids = jnp.asarray(RNG.integers(1, 50, (ROWS, LENGTH)), jnp.int32)
    whole = MeshConfig(fsdp=2).build(jax.devices()[:2])
    config = LlamaConfig(
        vocab_size=50, embed_dim=WIDTH, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=128,
        mlp_dim=UNITS, dtype="bfloat16", remat="kernels", scan_layers=True,
    )  # fmt: skip
    graphdef, params = nnx.split(config.make(rngs=nnx.Rngs(0)), nnx.Param)[:2]

    def step(partitioner):
        def loss(params):
            with partitioner():
                y = nnx.merge(graphdef, params)(ids)
            return y.astype(jnp.float32)[:, -1].mean(0).var()

        return jax.jit(jax.value_and_grad(loss)).trace(params)

    traced = [step(whole), step(dataclasses.replace(whole, fused_attention=False))]
    # Attention's and the layer's kernels, forward and backward; none is recomputed.
    assert [len(list(kernels_in(of.jaxpr.jaxpr))) for of in traced] == [4, 0]
    found, expected = (of.lower().compile()(params) for of in traced)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=0.02)
    for (path, a), b in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(expected[1]), strict=True):
        scale = np.abs(b).max()
        assert scale > 0, path
        np.testing.assert_allclose(a / scale, b / scale, atol=0.05, err_msg=str(path))
