"""Batches that an encoder reads together: the same numbers, and weights that travel once."""

import collections
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel, Projection
from jaxir.models.layers import param_shardings
from jaxir.models.t5 import T5Config
from jaxir.runtime.partitioning import MeshConfig

SIZES = {
    "vocab_size": 64,
    "embed_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_dim": 48,
    "dropout_rate": 0.1,
}
ROWS = 4


def model(kind: str, *, sharing="sde", **changes) -> DualEncoderModel:
    backbone = T5Config(head_dim=16, **SIZES | changes) if kind == "t5" else BertConfig(**SIZES | changes)
    config = DualEncoderConfig(backbone=backbone, sharing=sharing, projection=Projection(dimension=8))
    return DualEncoderModel(config, rngs=nnx.Rngs(0))


def texts(key=None):
    rng = np.random.default_rng(0)
    keys = (None,) * 3 if key is None else jax.random.split(key, 3)
    shapes = (((ROWS, 5), "query"), ((ROWS, 9), "passage"), ((2 * ROWS, 9), "passage"))
    return [
        (jnp.asarray(rng.integers(1, 64, s), jnp.int32), t, k) for (s, t), k in zip(shapes, keys, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "changes", "sharing"),
    [
        pytest.param("t5", {"scan_layers": True, "remat": True}, "sde", marks=pytest.mark.slow),
        pytest.param("bert", {"scan_layers": True}, "ade_spl", marks=pytest.mark.slow),
    ],
)
def test_encode_together_equals_encode(kind, changes, sharing):
    graph, params = nnx.split(model(kind, sharing=sharing, **changes))
    given = texts(jax.random.key(1))

    def total(params, together):
        built = nnx.merge(graph, params)
        if together:
            found = built.encode_together(given)
        else:
            found = [built.encode(ids, tower=tower, key=key) for ids, tower, key in given]
        return sum(jnp.sum(x @ jnp.cos((i + 1.0) * jnp.arange(8.0))) for i, x in enumerate(found)), found

    results = [jax.jit(jax.grad(total, has_aux=True), static_argnums=1)(params, how) for how in (True, False)]
    largest = max(np.abs(x).max() for x in jax.tree.leaves(results[0]))
    assert largest > 0.1
    for a, b in zip(*(jax.tree.leaves(r) for r in results), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * largest)
    plain = model(kind, sharing=sharing, **changes).encode_together(texts())
    assert np.abs(plain[0] - results[0][1][0]).max() > 1e-3  # dropout was on


def test_weights_travel_once_for_both_towers():
    partitioner = MeshConfig(fsdp=4).build(jax.devices()[:4])
    graph, params = nnx.split(nnx.eval_shape(lambda: model("t5", scan_layers=True, remat=True)))
    layout = param_shardings(params, partitioner)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, layout)

    def moved(number: int) -> collections.Counter:
        def loss(params):
            found = nnx.merge(graph, params).encode_together(texts()[:number])
            return sum(jnp.sum(x**3) for x in found)

        with partitioner():
            text = jax.jit(jax.grad(loss), out_shardings=layout).lower(shapes).compile().as_text()
        found = re.findall(r"= f32\[(?:1,)?([\d,]+)\]\S* (all-gather|reduce-scatter|all-reduce)\(", text)
        return collections.Counter(found)

    one, both = moved(1), moved(2)
    assert one["32,48", "all-gather"] >= 2
    for shape in ("32,48", "48,32", "32,32"):
        assert both[shape, "all-gather"] == one[shape, "all-gather"]
    assert sum(n for (_, kind), n in both.items() if kind != "all-gather") == sum(
        n for (_, kind), n in one.items() if kind != "all-gather"
    )


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_exported_programs_take_batches_of_any_shape(kind):
    """SavedModels need symbolic `b` and `l`."""
    shape = jax.export.symbolic_shape("b, l", constraints=["l <= 64"])
    graph, params = nnx.split(nnx.eval_shape(lambda: model(kind, scan_layers=True)))
    found = jax.eval_shape(
        lambda params, ids: nnx.merge(graph, params).encode(ids, tower="query"),
        params,
        jax.ShapeDtypeStruct(shape, jnp.int32),
    )
    assert found.shape == (shape[0], 8)
