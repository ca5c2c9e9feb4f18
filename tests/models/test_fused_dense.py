"""TPU kernels of gated feed-forward layers, interpreted: values and gradients are those of XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.costs import work
from jaxir.models import dense_kernel, fused_dense, layers
from jaxir.models.adapters import Adapter, Adapters
from jaxir.models.blocks import FeedForward
from jaxir.models.dense_kernel import Dense, Kind
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
            adapt((self.mlp.wi_0, self.mlp.wi_1, self.mlp.wo), rngs)


class Projections(nnx.Module):
    """A norm, two layers that read its result, and one that reads x."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = layers.RMSNorm(WIDTH, epsilon=1e-6, dtype="float32")
        how = {"axes": ("embed", "mlp"), "use_bias": False, "init": layers.normal(0.1), "dtype": "float32"}
        self.dense = nnx.List([layers.Linear(WIDTH, n, rngs=rngs, **how) for n in (UNITS, WIDTH, WIDTH)])
        adapt(self.dense, rngs)


def adapt(dense, rngs):
    for layer in dense:
        layer.adapter = Adapter(layer, Adapters(rank=4, alpha=8.0), rngs=rngs)
        layer.adapter.up[...] = jnp.asarray(RNG.normal(size=layer.adapter.up.shape) * 0.1)


def compare(layer, definition, kernels, partitioner, num_trained):
    """Compares a layer's results and gradients of x and of trained parameters; returns the jaxpr."""
    x, *cotangents = (jnp.asarray(RNG.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32) for _ in range(2))
    graphdef, state = nnx.split(layer)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    adapted = any("adapter" in name for name in named)
    trained = {n: x for n, x in named.items() if not adapted or "adapter" in n}
    assert len(trained) == num_trained

    def with_gradients(function):
        def loss(trained, x):
            leaves = list((named | trained).values())
            of = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))
            return function(of, x)

        def run(trained, x):
            with partitioner():
                y, back = jax.vjp(loss, trained, x)
                return y, back(cotangents[0])

        return jax.jit(run)

    wanted, run = with_gradients(definition)(trained, x), with_gradients(kernels)
    for (path, a), b in zip(jax.tree.leaves_with_path(run(trained, x)), jax.tree.leaves(wanted), strict=True):
        size = np.abs(b).max()
        assert size > 0.1, path
        np.testing.assert_allclose(a / size, b / size, atol=1e-5, err_msg=str(path))
    return jax.make_jaxpr(run)(trained, x).jaxpr


@pytest.mark.parametrize(
    ("activation", "adapted", "added", "mesh"),
    [("silu", False, True, SPLIT), ("silu", True, True, SPLIT), ("gelu_tanh", True, False, {})],
)
def test_a_feed_forward_layer_has_values_and_gradients_of_its_definition(activation, adapted, added, mesh):
    layer = Layer(activation, adapted=adapted)
    partitioner = MeshConfig(**mesh).build(jax.devices()[: 2 if mesh else 1])

    def definition(of, x):
        y = of.mlp(of.norm(x), key=None)
        return x + y if added else y

    def kernels(of, x):
        return fused_dense.feed(of.mlp, of.norm, x, added=added, partitioner=partitioner)

    program = compare(layer, definition, kernels, partitioner, 6 if adapted else 4)
    _, backward = kernels_in(program)
    # The gradient of a frozen kernel is not computed.
    assert [v.aval.size for v in backward.outvars[1:]].count(WIDTH * UNITS) == (0 if adapted else 3)


@pytest.mark.parametrize("mesh", [{}, SPLIT])
@pytest.mark.parametrize("passed", [False, True])
def test_projections_have_values_and_gradients_of_their_definition(mesh, passed):
    partitioner = MeshConfig(**mesh).build(jax.devices()[: 2 if mesh else 1])

    def definition(of, x):
        first, second = (layer(of.norm(x)) for layer in of.dense[:2])
        return second * first[..., :WIDTH] + (x if passed else second) + of.dense[2](second)

    def kernels(of, x):
        how = {"passed": passed, "partitioner": partitioner}
        first, second, *rest = fused_dense.project(of.dense[:2], of.norm, x, **how)
        residual = second * first[..., :WIDTH] + (rest[0] if passed else second)
        out = fused_dense.project(of.dense[2:], None, second, added=residual, partitioner=partitioner)
        return out[0]

    compare(Projections(), definition, kernels, partitioner, 6)


def kernels_in(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in work._subprograms(equation.params):
                yield from kernels_in(inner)


ELEMENTWISE = {
    "add", "add_any", "sub", "mul", "div", "neg", "exp", "logistic", "tanh", "rsqrt", "convert_element_type",
    "integer_pow", "square", "select_n", "gt",
}  # fmt: skip


def elementwise(jaxpr):
    """Counts elementwise operations and inputs of reductions as `jaxir.costs.work` does."""
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ELEMENTWISE:
            total += sum(v.aval.size for v in equation.outvars if v.aval.shape)
        elif name.startswith("reduce_"):
            total += equation.invars[0].aval.size
        elif name != "cond":
            total += sum(map(elementwise, work._subprograms(equation.params)))
    return total


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize("rank", [0, 16])
def test_kernels_report_their_cost(activation, rank):
    """Plans add up these costs."""
    rows, (width, units) = 512, (1024, 3072)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)

    def dense(*shape):
        adapter = ((shape[0], rank), (rank, shape[1])) if rank else ()
        return Dense(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (shape, *adapter)))

    shapes = [(width, units), (width, units), *([(units, width)] if activation else [])]
    layers_ = [dense(*shape) for shape in shapes]
    results = shapes[2:] or shapes
    gradients = [jax.ShapeDtypeStruct((rows, n), jnp.bfloat16) for _, n in results]
    kind = Kind(activation, 1e-6, False, (2.0 if rank else None,) * len(shapes), trained=not rank)
    scale = jax.ShapeDtypeStruct((1, width), jnp.float32)
    forward = jax.make_jaxpr(lambda *a: dense_kernel.forward([a[0]], *a[1:], kind))(x, scale, layers_)
    backward = jax.make_jaxpr(lambda *a: dense_kernel.backward(*a, kind))(x, scale, layers_, gradients)
    for program in (forward, backward):
        (kernel,) = kernels_in(program.jaxpr)
        blocks, body = rows // dense_kernel.ROWS, kernel.params["jaxpr"]
        assert kernel.params["cost_estimate"].flops == blocks * work._trace(body).flops
        reported = int(kernel.params["metadata"]["elementwise"])
        assert reported == pytest.approx(blocks * elementwise(body), rel=0.2)


@pytest.mark.slow
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
