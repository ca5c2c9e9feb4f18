"""Dual encoders: towers, pooling, projection, normalisation, meshes, and batches that are read together."""

import collections
import dataclasses
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.interop.model import stored
from jaxir.models import layers, packed
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel, Projection, l2_normalize, pool
from jaxir.models.t5 import T5Config
from jaxir.runtime.partitioning import MeshConfig

BERT = BertConfig(vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, max_positions=16)
ONE = dataclasses.replace(BERT, num_layers=1)
T5 = T5Config(vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, head_dim=8, mlp_dim=48)
IDS = jnp.array([[4, 5, 6, 7], [8, 9, 0, 0]], jnp.int32)


encode = nnx.jit(lambda model, ids, tower: model.encode(ids, tower=tower), static_argnames="tower")
hidden_of = nnx.jit(lambda encoder: encoder(IDS))


def names_of(model):
    return {path[0] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def test_sharing_decides_which_parameters_exist():
    projection = Projection(dimension=8)
    towers = {}
    for sharing in ("sde", "ade", "ade_spl"):
        config = DualEncoderConfig(backbone=ONE, sharing=sharing, projection=projection)
        model = DualEncoderModel(config, rngs=nnx.Rngs(0))
        towers[sharing] = names_of(model), *(encode(model, IDS, tower=t) for t in ("query", "passage"))
        assert config.dimension == 8 == towers[sharing][1].shape[1]
    assert towers["sde"][0] == {"encoder", "projection"}
    assert towers["ade_spl"][0] == {"query_encoder", "passage_encoder", "projection"}
    assert towers["ade"][0] == {f"{t}_{p}" for t in ("query", "passage") for p in ("encoder", "projection")}
    np.testing.assert_array_equal(*towers["sde"][1:])
    assert all(np.abs(towers[s][1] - towers[s][2]).max() > 0.01 for s in ("ade", "ade_spl"))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_heads_equal_a_plain_transcription(pooling, activation, similarity):
    projection = Projection(dimension=8, use_bias=True, activation=activation)
    config = DualEncoderConfig(backbone=ONE, pooling=pooling, projection=projection, similarity=similarity)
    model = DualEncoderModel(config, rngs=nnx.Rngs(0))
    model.projection.bias[...] = jnp.linspace(-1, 1, 8)
    hidden = np.asarray(hidden_of(model.encoder))
    kept = {"cls": lambda n: slice(1), "lasttoken": lambda n: slice(n - 1, n), "mean": slice}[pooling]
    pooled = np.stack([row[kept(n)].mean(0) for row, n in zip(hidden, (4, 2), strict=True)])
    expected = pooled @ np.asarray(model.projection.kernel) + np.linspace(-1, 1, 8, dtype=np.float32)
    expected = np.tanh(expected) if activation == "tanh" else expected
    if similarity == "cosine":
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = encode(model, IDS, tower="query")
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("scan", [False, True], ids=["listed", "scanned"])
def test_poolings_of_two_layers_average_them(scan):
    """The first block's output is taken from an encoder with only one block."""
    deep = dataclasses.replace(BERT, num_layers=3, scan_layers=scan)
    model = DualEncoderModel(DualEncoderConfig(backbone=deep, similarity="dot"), rngs=nnx.Rngs(0))
    one = DualEncoderConfig(backbone=ONE, similarity="dot")
    params = {n: v for n, v in stored.params_of(model).items() if n in stored.model_shapes(one)}
    short = stored.build(stored.StoredModel(config=one, params=params, tokenizer=None, settings=None))
    embeddings = nnx.jit(lambda e: e.embeddings(IDS, None, key=None))(model.encoder)
    read = np.stack([np.asarray(row[:n]).mean(0) for row, n in zip(embeddings, (4, 2), strict=True)])
    first, last = (np.asarray(encode(m, IDS, tower="query")) for m in (short, model))
    assert min(np.abs(a - b).max() for a, b in ((first, last), (read, first))) > 0.01
    for pooling, early in (("first_last", first), ("embeddings_last", read)):
        model.config = dataclasses.replace(model.config, pooling=pooling)
        np.testing.assert_allclose(encode(model, IDS, tower="query"), (early + last) / 2, atol=1e-5)


def test_the_embedding_is_float32_and_of_length_one_in_bfloat16_too():
    config = DualEncoderConfig(backbone=dataclasses.replace(T5, dtype="bfloat16"))
    found = encode(DualEncoderModel(config, rngs=nnx.Rngs(0)), IDS, tower="passage")
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-6)


def test_vectors_of_any_length_become_of_length_one():
    lengths = np.float32([1e-6, 1e-2, 1.0, 1e6])
    found = l2_normalize(jnp.asarray(np.outer(lengths, [0.6, -0.8]), jnp.float32))
    np.testing.assert_allclose(found, [[0.6, -0.8]] * 4, rtol=1e-5)


@pytest.mark.parametrize("backbone", [ONE, dataclasses.replace(T5, num_layers=1)], ids=["bert", "t5"])
def test_a_row_of_padding_gives_zeros_and_finite_gradients(backbone):
    graphdef, state = nnx.split(DualEncoderModel(DualEncoderConfig(backbone=backbone), rngs=nnx.Rngs(0)))
    ids = IDS.at[1].set(0)

    def first_sum(state):
        found = nnx.merge(graphdef, state).encode(ids, tower="query")
        return found[:, 0].sum(), found

    gradients, found = jax.jit(jax.grad(first_sum, has_aux=True))(state)
    np.testing.assert_array_equal(found[1], 0.0)
    assert np.abs(found[0]).max() > 0
    leaves = jax.tree.leaves(gradients)
    assert all(np.isfinite(leaf).all() for leaf in leaves) and any(np.abs(leaf).max() > 0 for leaf in leaves)


# Sizes that no parameter has, so that the compiled program's shapes show what an array is.
BATCH, LENGTH = 28, 11


def compiled_gradient(config, state, graphdef, partitioner):
    """The compiled gradient of a loss with respect to `state`, and its inputs, laid out by `partitioner`."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 64, (BATCH, LENGTH)).astype(np.int32)
    ids[::3, 6:] = 0
    target = rng.normal(size=(BATCH, config.dimension)).astype(np.float32)

    def loss(state, ids, target):
        return (nnx.merge(graphdef, state).encode(ids, tower="query") * target).sum()

    if partitioner is None:
        return jax.jit(jax.value_and_grad(loss)).lower(state, ids, target).compile(), (ids, target)
    inputs = jax.device_put((ids, target), partitioner.sharding(("batch", None)))
    out = (None, layers.param_shardings(state, partitioner))
    with partitioner():
        lowered = jax.jit(jax.value_and_grad(loss), out_shardings=out).lower(state, *inputs)
    return lowered.compile(), inputs


def unsplit_shapes(compiled, rows):
    """Shapes in a compiled program that hold more than the `rows` of one device."""
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    assert shapes & {(rows, LENGTH, 32), (rows * LENGTH, 32)}
    return {s for s in shapes if {n * rows * length for n in (2, 4) for length in (1, LENGTH)} & set(s)}


@pytest.mark.parametrize(
    ("backbone", "mesh"),
    [
        (dataclasses.replace(BERT, scan_layers=True), MeshConfig(fsdp=2, tensor=2)),
        (dataclasses.replace(T5, scan_layers=True, remat=True), MeshConfig(fsdp=4)),
    ],
    ids=["bert-scanned-fsdp2-tensor2", "t5-scanned-fsdp4"],
)
def test_sharded_equals_single_device_and_activations_stay_split_by_batch(backbone, mesh):
    config = DualEncoderConfig(backbone=backbone, projection=Projection(dimension=16))
    partitioner = mesh.build()
    graphdef, whole = nnx.split(DualEncoderModel(config, rngs=nnx.Rngs(0)))
    state = jax.device_put(whole, layers.param_shardings(whole, partitioner))
    step, inputs = compiled_gradient(config, state, graphdef, partitioner)
    loss, gradients = step(state, *inputs)
    reference, inputs = compiled_gradient(config, whole, graphdef, None)
    expected_loss, expected = reference(whole, *inputs)
    assert float(loss) == pytest.approx(float(expected_loss), abs=1e-4)
    for found, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, want, atol=1e-4)
    assert not unsplit_shapes(step, BATCH // partitioner.batch_divisor())


ROWS = 4


def towers(kind: str, *, sharing="sde", **changes) -> DualEncoderModel:
    backbone = dataclasses.replace(T5 if kind == "t5" else BERT, **changes)
    config = DualEncoderConfig(backbone=backbone, sharing=sharing, projection=Projection(dimension=8))
    return DualEncoderModel(config, rngs=nnx.Rngs(0))


def texts(key=None):
    rng = np.random.default_rng(0)
    keys = (None,) * 3 if key is None else jax.random.split(key, 3)
    shapes = (((ROWS, 5), "query"), ((ROWS, 9), "passage"), ((2 * ROWS, 9), "passage"))
    return [
        (jnp.asarray(rng.integers(1, 64, s), jnp.int32), t, k) for (s, t), k in zip(shapes, keys, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "remat", "sharing"), [("t5", True, "sde"), ("bert", False, "ade_spl")])
def test_encode_together_equals_encode(kind, remat, sharing):
    changes = {"scan_layers": True, "remat": remat}
    graph, params = nnx.split(towers(kind, sharing=sharing, **changes))
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
    plain = towers(kind, sharing=sharing, **changes).encode_together(texts())
    assert np.abs(plain[0] - results[0][1][0]).max() > 1e-3  # guard: dropout was on


def test_weights_travel_once_for_both_towers():
    partitioner = MeshConfig(fsdp=4).build(jax.devices()[:4])
    graph, params = nnx.split(nnx.eval_shape(lambda: towers("t5", scan_layers=True, remat=True)))
    layout = layers.param_shardings(params, partitioner)
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
    reductions = [sum(n for (_, kind), n in x.items() if kind != "all-gather") for x in (one, both)]
    assert reductions[0] == reductions[1]


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_exported_programs_take_batches_of_any_shape(kind):
    """SavedModels need symbolic `b` and `l`."""
    shape = jax.export.symbolic_shape("b, l", constraints=["l <= 16"])
    graph, params = nnx.split(nnx.eval_shape(lambda: towers(kind, scan_layers=True)))
    found = jax.eval_shape(
        lambda params, ids: encode(nnx.merge(graph, params), ids, "query"),
        params,
        jax.ShapeDtypeStruct(shape, jnp.int32),
    )
    assert found.shape == (shape[0], 8)


@pytest.mark.parametrize("how", ["mean", "cls", "max", "weightedmean", "lasttoken", "mean_sqrt_len_tokens"])
def test_each_row_leaves_out_as_many_tokens_as_its_prompt_has(how):
    """A row is pooled as if all rows left out as many tokens as it does: none, some, or all of its tokens."""
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6, 3)), jnp.float32)
    mask = jnp.arange(6)[None] < jnp.array([6, 4, 6, 3, 0])[:, None]
    counts = [0, 2, 5, 3, 1]
    rows = pool(hidden, mask, how=how, left_out=jnp.array(counts, jnp.int32))
    for row, count in enumerate(counts):
        alone = pool(hidden[row : row + 1], mask[row : row + 1], how=how, left_out=count)
        np.testing.assert_allclose(rows[row], alone[0], rtol=1e-6)
    if how == "mean":
        np.testing.assert_allclose(rows[1], np.asarray(hidden)[1, 2:4].mean(0), rtol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max", "weightedmean"])
def test_texts_that_share_rows_get_the_vectors_that_they_get_alone(pooling):
    config = DualEncoderConfig(backbone=BERT, pooling=pooling, passage_prompt_tokens=1)
    model = DualEncoderModel(config, rngs=nnx.Rngs(0))
    texts = [[4, 5, 6], [7, 8], [9] * 16, [10, 11, 12, 13]]
    rows = np.zeros([2, 32], np.int32), np.full([2, 32], -1, np.int32)  # longer than the table of positions
    for row, start, number in ((0, 0, 0), (0, 3, 1), (1, 0, 2), (1, 16, 3)):
        at = slice(start, start + len(texts[number]))
        rows[0][row, at], rows[1][row, at] = texts[number], number
    assert packed.packs(model, "passage")
    found = packed.encode(model, *map(jnp.asarray, rows), tower="passage")
    assert found.shape == (2 * 32 // packed.SHORTEST, BERT.embed_dim)
    for number, text in enumerate(texts):
        alone = encode(model, jnp.array([text + [0] * (16 - len(text))]), "passage")
        np.testing.assert_allclose(found[number], alone[0], atol=1e-6)


def test_models_whose_rows_cannot_be_shared_are_known():
    for config in (
        DualEncoderConfig(backbone=T5),
        DualEncoderConfig(backbone=dataclasses.replace(BERT, reserved_positions=2)),
        DualEncoderConfig(backbone=BERT, pooling="first_last"),
        DualEncoderConfig(backbone=BERT, layers_from=1),
    ):
        assert not packed.packs(DualEncoderModel(config, rngs=nnx.Rngs(0)), "query")
