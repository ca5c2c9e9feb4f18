"""Encoders: scan, dropout, types, shapes, padding, edits and published sizes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop.model import stored
from jaxir.models import layers, stacks, t5
from jaxir.models.bert import Bert, BertConfig
from jaxir.models.deberta import DebertaConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel
from jaxir.models.modernbert import ModernBertConfig
from jaxir.models.relative_bias import relative_buckets
from jaxir.models.t5 import T5Config
from jaxir.runtime import cpu
from jaxir.runtime.partitioning import MeshConfig

BERT = BertConfig(vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, max_positions=16)
T5 = T5Config(vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, head_dim=12, mlp_dim=48)
RATES = {"embedding_dropout_rate": 0.1, "attention_dropout_rate": 0.1, "mlp_dropout_rate": 0.1}
SIZES = {"vocab_size": 50, "embed_dim": 32, "num_heads": 4, "mlp_dim": 48}
LOCAL = {"max_positions": 16, "local_attention": 4, "global_every": 2}
MODERNBERT = ModernBertConfig(num_layers=3, **SIZES, **LOCAL, **RATES)
DEBERTA = DebertaConfig(num_layers=2, relative_buckets=8, relative_max_distance=16, **SIZES)
BACKBONES = {"bert": BERT, "deberta": DEBERTA, "modernbert": MODERNBERT, "t5": T5}
# DeBERTa takes longest to compile.
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) if name == "deberta" else name for name in BACKBONES]
# The fewest layers, for behaviour that all blocks share.
SHALLOW = {
    name: dataclasses.replace(config, num_layers=2 if config is MODERNBERT else 1)
    for name, config in BACKBONES.items()
}
IDS = jnp.array([[4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 0, 0, 0, 0, 0]], jnp.int32)
# Random weights for a sum of outputs, because LayerNorm makes a plain sum constant.
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(*IDS.shape, 32)), jnp.float32)


run = nnx.jit(lambda model, ids, key=None: model(ids, key=key))


def loss_and_gradients(config, key):
    """The weighted sum of real tokens' outputs, and its gradients by canonical name."""
    graphdef, state = nnx.split(config.make(rngs=nnx.Rngs(0)))

    def loss(state, key):
        output = nnx.merge(graphdef, state)(IDS, key=key).astype(jnp.float32)
        return jnp.where((IDS != 0)[..., None], output * WEIGHTS, 0.0).sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(state, key)
    return float(value), stored.flatten(nnx.to_pure_dict(gradients))


@pytest.fixture(scope="module", params=SLOWLY)
def plain(request):
    config = BACKBONES[request.param]
    return config, *loss_and_gradients(config, jax.random.key(1))


def test_every_parameter_has_a_gradient(plain):
    config, _, gradients = plain
    assert gradients.keys() == stored.encoder_shapes(config).keys()
    for name, value in gradients.items():
        # A key's bias shifts all logits of a query equally, so its gradient is zero but for rounding.
        if not name.endswith("attention.key.bias"):
            assert np.abs(value).max() > 1e-4, name


def test_scan_and_remat_change_no_number(plain):
    config, loss, gradients = plain
    changed = dataclasses.replace(config, scan_layers=True, remat=True)
    value, found = loss_and_gradients(changed, jax.random.key(1))
    assert value == pytest.approx(loss, rel=1e-5, abs=1e-4)
    assert found.keys() == gradients.keys()
    for name, expected in gradients.items():
        np.testing.assert_allclose(found[name], expected, atol=2e-4, err_msg=name)


def no_dropout(config) -> dict[str, float]:
    names = (field.name for field in dataclasses.fields(config))
    return {name: 0.0 for name in names if name.endswith("dropout_rate")}


@pytest.mark.slow
def test_dropout_needs_a_key_and_follows_it():
    for config in SHALLOW.values():
        model = config.make(rngs=nnx.Rngs(0))
        off = np.asarray(run(model, IDS))
        one, again, two = (np.asarray(run(model, IDS, jax.random.key(seed))) for seed in (1, 1, 2))
        np.testing.assert_array_equal(one, again)
        assert np.abs(one - two).max() > 0.1 and np.abs(one - off).max() > 0.1
        without = dataclasses.replace(config, **no_dropout(config)).make(rngs=nnx.Rngs(0))
        np.testing.assert_allclose(run(without, IDS, jax.random.key(1)), off, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *(("bert", rate) for rate in ("dropout_rate", "attention_dropout_rate")),
        *(("deberta", rate) for rate in ("dropout_rate", "attention_dropout_rate")),
        *(("modernbert", rate) for rate in RATES),
    ],
)
def test_each_dropout_acts_alone(name, rate):
    config = SHALLOW[name]
    dropping = dataclasses.replace(config, **no_dropout(config) | {rate: 0.5}).make(rngs=nnx.Rngs(0))
    off = run(config.make(rngs=nnx.Rngs(0)), IDS)  # rates do not change the initial parameters
    assert np.abs(run(dropping, IDS, jax.random.key(0)) - off).max() > 1e-3


def test_t5_draws_a_random_number_per_feature_not_per_element():
    graphdef, state = nnx.split(T5.make(rngs=nnx.Rngs(0)))
    program = jax.make_jaxpr(lambda s, key: nnx.merge(graphdef, s)(IDS, key=key))(state, jax.random.key(0))
    (rows, length), width = IDS.shape, T5.embed_dim
    drawn = sorted({shape for shape in _random_shapes(program.jaxpr) if len(shape) > 1})
    expected = {(rows, 1, width), (rows, 1, T5.mlp_dim), (rows, length, T5.num_heads, 1)}
    assert drawn == sorted(expected)


def _random_shapes(jaxpr):
    for equation in jaxpr.eqns:
        # The operation of `counter_random.mixed`, which draws the random numbers.
        if equation.primitive.name == "shift_right_logical":
            yield equation.outvars[0].aval.shape
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _random_shapes(inner)


class _Noise(nnx.Module):
    """A block that adds the noise of its key."""

    def __init__(self, rngs):
        self.scale = layers.param(jnp.ones((1,)), "embed")

    def __call__(self, x, *, key):
        return x + jax.random.normal(key, x.shape) * self.scale[...][None, None]


@pytest.mark.parametrize("scan", [False, True])
def test_each_layer_has_its_own_key(scan):
    blocks = stacks.make_stack(lambda rngs: _Noise(rngs), 2, scan=scan, rngs=nnx.Rngs(0))
    (both,) = stacks.run_stack(blocks, [jnp.zeros((1, 3, 4))], [()], remat=True, keys=[jax.random.key(5)])
    keys = jax.random.split(jax.random.key(5), 2)
    first, second = (jax.random.normal(k, (1, 3, 4)) for k in keys)
    np.testing.assert_allclose(both, first + second, rtol=1e-6)
    assert np.abs(first - second).max() > 0.1


@pytest.mark.parametrize("name", SLOWLY)
def test_bfloat16_is_near_float32(name):
    config = SHALLOW[name]
    low = dataclasses.replace(config, dtype="bfloat16")
    models = [c.make(rngs=nnx.Rngs(0)) for c in (config, low)]
    assert {p.dtype for p in jax.tree.leaves(nnx.state(models[1]))} == {jnp.dtype("float32")}
    exact, rough = (run(m, IDS) for m in models)
    assert (exact.dtype, rough.dtype) == (jnp.float32, jnp.bfloat16)
    error = np.abs(np.where((IDS != 0)[..., None], exact - rough.astype(jnp.float32), 0)).max()
    assert 1e-4 < error < 0.2, error
    _, gradients = loss_and_gradients(low, jax.random.key(0))
    assert all(value.dtype == np.float32 and np.isfinite(value).all() for value in gradients.values())


def test_fast_cpu_products_are_as_near_to_float32_as_plain_ones(monkeypatch):
    made, product = [], cpu._product
    monkeypatch.setattr(cpu, "has_quick_bfloat16", lambda: True)
    monkeypatch.setattr(cpu, "_product", lambda *args: made.append(args) or product(*args))
    low = dataclasses.replace(SHALLOW["bert"], dtype="bfloat16")
    exact, plain = (gradient_vector(dataclasses.replace(low, dtype=d)) for d in ("float32", "bfloat16"))
    assert not made
    with MeshConfig(data=1).build(jax.devices()[:1])():
        quick = gradient_vector(low)
    assert made
    errors = [np.linalg.norm(g - exact) / np.linalg.norm(exact) for g in (plain, quick)]
    assert 1e-4 < errors[1] < min(1.1 * errors[0], 0.05), errors


def gradient_vector(config) -> np.ndarray:
    _, gradients = loss_and_gradients(config, jax.random.key(0))
    return np.concatenate([np.ravel(gradients[name]) for name in sorted(gradients)])


def test_compiled_size_does_not_grow_with_depth_when_scanned():
    def size(depth: int) -> int:
        config = dataclasses.replace(BERT, num_layers=depth, scan_layers=True, remat=True)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0))))
        gradient = jax.grad(lambda s, key: nnx.merge(graphdef, s)(IDS, key=key).sum())
        return len(jax.jit(gradient).lower(state, jax.random.key(0)).as_text().splitlines())

    assert size(16) < 1.02 * size(4)


def test_texts_longer_than_the_position_table_raise():
    with pytest.raises(ValueError, match="17 tokens exceed the model's 16 positions"):
        Bert(BERT, rngs=nnx.Rngs(0))(jnp.ones((1, 17), jnp.int32))


def test_an_id_outside_the_vocabulary_gives_nan():
    output = run(SHALLOW["bert"].make(rngs=nnx.Rngs(0)), jnp.array([[4, 50]], jnp.int32))
    assert np.isnan(output).any()


def reference_bucket(distance: int, num_buckets: int = 32, max_distance: int = 128) -> int:
    """T5's formula, in float32 as in T5."""
    half, bucket = num_buckets // 2, 0
    if distance > 0:
        bucket += half
    size, exact = abs(distance), half // 2
    if size < exact:
        return bucket + size
    ratio = np.log(np.float32(size) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    return bucket + min(exact + int(ratio * np.float32(half - exact)), half - 1)


def test_relative_buckets_equal_the_formula():
    distances = np.arange(-200, 201)
    found = relative_buckets(jnp.asarray(distances)[None], num_buckets=32, max_distance=128)[0]
    np.testing.assert_array_equal(found, [reference_bucket(d) for d in distances.tolist()])
    starts = [int(d) for d in range(8, 201) if found[200 - d] != found[200 - d + 1]]
    assert starts == [8, 12, 16, 23, 32, 46, 64, 91]


MILLIONS = {"1.1-small": 35.3, "1.1-base": 109.6, "1.1-large": 341.2, "1.1-xl": 1224, "1.1-xxl": 4762}
MILLIONS |= {"1.0-small": 35.3, "1.0-base": 109.6, "1.0-large": 334.9, "1.0-3b": 1241, "1.0-11b": 4865}


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_presets_have_the_published_sizes(name, millions):
    config = t5.preset(name, scan_layers=True)
    state = nnx.state(nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0))))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))
    assert round(count / 1e6, 1 if millions < 1000 else 0) == millions


@pytest.mark.parametrize("config", BACKBONES.values(), ids=BACKBONES)
def test_every_parameter_names_its_axes(config):
    for scan in (False, True):
        changed = dataclasses.replace(config, scan_layers=scan)
        state = nnx.state(nnx.eval_shape(lambda c=changed: c.make(rngs=nnx.Rngs(0))), nnx.Param)
        params = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Param))
        axes = [p.get_metadata()["logical_axes"] for p in params]
        assert [len(a) for a in axes] == [leaf.ndim for leaf in jax.tree.leaves(state)]
        assert any(a[0] == "layers" for a in axes) == scan


@pytest.mark.parametrize("name", SLOWLY)
def test_an_edit_changes_what_the_first_block_reads_and_no_other_batch(name):
    model = SHALLOW[name].make(rngs=nnx.Rngs(0))

    def read(edit):
        seen = []

        def edit_and_note(x):
            seen.append(x.shape)
            return edit(x)

        @nnx.jit
        def alone_and_together(model):
            pair = model.together([IDS, IDS[:, :4]], [None, None], [edit_and_note, None])
            return model(IDS, edit=edit_and_note), pair

        one, both = alone_and_together(model)
        assert set(seen) == {(2, 8, 32)}
        np.testing.assert_allclose(np.where((IDS != 0)[..., None], one - both[0], 0), 0, atol=1e-5)
        return both

    plain = [run(model, ids) for ids in (IDS, IDS[:, :4])]
    same, cut = read(lambda x: x), read(lambda x: x.at[:, 1].set(0.0))
    np.testing.assert_allclose(same[0], plain[0], atol=1e-5)
    np.testing.assert_allclose(cut[1], plain[1], atol=1e-5)
    assert np.abs(cut[0] - plain[0]).max() > 0.1


def test_an_encoder_without_edits_is_refused_an_edit():
    class Own(Bert):
        def together(self, ids, keys):
            return super().together(ids, keys)

    config = SHALLOW["bert"]
    model = DualEncoderModel(DualEncoderConfig(backbone=config), rngs=nnx.Rngs(0))
    model.encoder = Own(config, rngs=nnx.Rngs(0))
    assert nnx.jit(lambda model: model.encode(IDS, tower="query"))(model).shape == (2, 32)
    with pytest.raises(UserError, match=r"Own\.together takes no 'edits'; add this argument"):
        model.encode(IDS, tower="query", edit=lambda x: x)
