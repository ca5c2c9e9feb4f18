"""Optimizers, compared with steps computed in numpy, and schedules, compared with their formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxir.core.errors import UserError
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel
from jaxir.models.t5 import T5Config
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.step import train_state as state_lib
from jaxir.training.step.optimizers import (
    Adafactor,
    AdamW,
    decayed,
    in_stack,
    linear_schedule,
    t5x_schedule,
)
from tests.training.tiny_run import Bag, bert


def apply(optimizer, params, gradients):
    """Returns the parameters after a step for each tree of gradients; the run has 10 steps."""
    transform = optimizer.build(10).transform
    opt_state = jax.jit(transform.init)(params)

    @jax.jit
    def step(params, opt_state, gradient):
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = transform.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for gradient in gradients:
        params, opt_state = step(params, opt_state, gradient)
    return params


def test_the_rate_rises_to_its_peak_and_falls_to_zero_at_the_last_step():
    schedule = linear_schedule(2.0, warmup_steps=4, steps=12)
    rates = [float(schedule(jnp.int32(t))) for t in range(13)]
    assert float(schedule(jnp.int32(13))) == 0.0, "never below"
    np.testing.assert_allclose(rates[:4], [0.5, 1.0, 1.5, 2.0])
    np.testing.assert_allclose(rates[4:], [2.0 * (12 - t) / 8 for t in range(4, 13)], rtol=1e-6)
    without = linear_schedule(1e-3, warmup_steps=0, steps=10)
    np.testing.assert_allclose([float(without(t)) for t in (0, 5, 10)], [1e-3, 5e-4, 0.0], rtol=1e-6)


def test_the_rate_may_fall_with_the_square_root_whatever_the_length_of_the_run():
    optimizer = AdamW(learning_rate=2e-5, warmup_steps=10_000, decay="inverse_sqrt")
    steps = np.array([1, 50, 9_999, 10_000, 10_001, 40_000])
    expected = 2e-3 * np.minimum(steps**-0.5, steps * 10_000**-1.5)  # Chuang 2024, appendix B.1
    for length in (10, 50_000):
        rates = [float(optimizer.build(length).schedule(jnp.int32(t - 1))) for t in steps]
        np.testing.assert_allclose(rates, expected, rtol=1e-5)
    assert expected[3] == pytest.approx(2e-5) and expected[5] == pytest.approx(1e-5)
    shares = AdamW(learning_rate=2e-5, warmup_steps=0.05, decay="inverse_sqrt")
    for length, first in ((1, 2e-5), (10, 2e-5), (40, 1e-5)):
        assert float(shares.build(length).schedule(jnp.int32(0))) == pytest.approx(first)
    with pytest.raises(UserError, match="requires a warm-up: set warmup_steps to at least 1"):
        AdamW(decay="inverse_sqrt").build(10)


@pytest.mark.parametrize("warmup_steps", [10, 40])
def test_run_may_end_within_its_warm_up_if_allowed(warmup_steps):
    schedule = AdamW(learning_rate=2.0, warmup_steps=warmup_steps, unfinished_warmup=True).build(10).schedule
    expected = [2.0 * (t + 1) / warmup_steps for t in range(10)]
    np.testing.assert_allclose([float(schedule(jnp.int32(t))) for t in range(10)], expected, rtol=1e-6)
    whole = AdamW(learning_rate=2.0, warmup_steps=4, unfinished_warmup=True).build(10).schedule
    usual = linear_schedule(2.0, warmup_steps=4, steps=10)
    assert [float(whole(t)) for t in range(10)] == [float(usual(t)) for t in range(10)]


def test_t5x_s_rate_is_its_formula():
    """`t5x.utils.create_learning_rate_scheduler` with factors "linear_decay", written out."""
    base, warmup, factor = 1e-3, 4, 0.3
    schedule = t5x_schedule(base, warmup_steps=warmup, steps=12, decay_factor=factor)
    for t in range(12):
        expected = max(base * min(t / warmup, 1.0 + factor * (warmup - t)), 1e-8)
        assert float(schedule(jnp.int32(t))) == pytest.approx(expected, rel=1e-6), t
    assert float(schedule(0)) == pytest.approx(1e-8)
    assert float(schedule(11)) == pytest.approx(1e-8)  # the formula would be negative here
    # The paper's schedule falls from the full rate to 0 at the end of training.
    paper = [float(t5x_schedule(base, warmup_steps=0, steps=8)(t)) for t in range(8)]
    np.testing.assert_allclose(paper, [base * (8 - t) / 8 for t in range(8)], rtol=1e-5)
    warm = t5x_schedule(base, warmup_steps=2, steps=10)
    np.testing.assert_allclose([float(warm(t)) for t in (1, 2, 6, 9)], [5e-4, 1e-3, 5e-4, 1.25e-4], rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        (AdamW, {"warmup_steps": 10}, "warmup_steps must be at least 0 and less than the 10 steps"),
        (AdamW, {"learning_rate": -1.0}, "learning_rate must be a number of at least 0, not -1.0"),
        (Adafactor, {"learning_rate": float("nan")}, "learning_rate must be a number of at least 0, not nan"),
        (AdamW, {"learning_rate": "fast"}, "learning_rate must be a number of at least 0, not 'fast'"),
        (Adafactor, {"decay_factor": -0.1}, "decay_factor must be a number of at least 0 or None, not -0.1"),
        (AdamW, {"clip_norm": 0.0}, "clip_norm must be a number above 0 or None, not 0.0"),
        (AdamW, {"b2": 1.0}, "b2 must be a number of at least 0 and below 1, not 1.0"),
    ],
)
def test_settings_out_of_range_are_refused(kind, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        kind(**settings).build(10)


def test_adamw_is_the_equations_with_clipping_and_no_decay_of_biases():
    rng = np.random.default_rng(0)
    params = {"layer": {"kernel": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}}
    params = jax.tree.map(np.float32, params)
    gradients = [jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), params) for _ in range(3)]
    optimizer = AdamW(learning_rate=0.1, warmup_steps=2, weight_decay=0.3, b1=0.8, b2=0.9, clip_norm=0.5)
    found = apply(optimizer, params, gradients)
    expected = jax.tree.map(np.float64, params)
    m = jax.tree.map(np.zeros_like, expected)
    v = jax.tree.map(np.zeros_like, expected)
    for t, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
        assert norm > 0.5
        rate = [0.05, 0.1, 0.1][t - 1]
        for name, decay in (("kernel", 0.3), ("bias", 0.0)):
            g, x = gradient["layer"][name] * 0.5 / norm, expected["layer"][name]
            m["layer"][name] = 0.8 * m["layer"][name] + 0.2 * g
            v["layer"][name] = 0.9 * v["layer"][name] + 0.1 * g**2
            step = (m["layer"][name] / (1 - 0.8**t)) / (np.sqrt(v["layer"][name] / (1 - 0.9**t)) + 1e-8)
            expected["layer"][name] = x - rate * (step + decay * x)
    for name, value in expected["layer"].items():
        np.testing.assert_allclose(found["layer"][name], value, rtol=2e-5)


LAYERS, STEPS = 20, 3
STACKED = {"wide": (16, 24), "tall": (40, 18), "square": (32, 32), "narrow": (32, 12), "scale": (24,)}


def layers_alone(tree):
    """Splits {name: [LAYERS, ...]} into a tree for each layer, as in a model without scan."""
    return {i: {name: x[i] for name, x in tree.items()} for i in range(LAYERS)}


@pytest.mark.slow
def test_adafactor_treats_each_layer_of_a_scanned_stack_as_a_parameter_of_its_own():
    """The stack is large enough to be factored along its layers by mistake, and scales differ by layer."""
    rng = np.random.default_rng(3)
    sizes = 10.0 ** rng.uniform(-4, 0.5, LAYERS)

    def draw(shape, scale):
        return (rng.normal(size=(LAYERS, *shape)) * scale.reshape(-1, *[1] * len(shape))).astype(np.float32)

    start = {name: draw(shape, sizes) for name, shape in STACKED.items()}
    # Each gradient's size falls or grows from step to step, so that some layers' updates are clipped.
    gradients = [
        {name: draw(shape, 10.0 ** rng.uniform(-3, 3, LAYERS)) for name, shape in STACKED.items()}
        for _ in range(STEPS)
    ]
    optimizer = Adafactor(learning_rate=0.1, min_dim_size_to_factor=16)

    def trained(optimizer, layers_of):
        tree, *trees = ({"layers": layers_of(x), "token": x["wide"][0]} for x in (start, *gradients))
        return apply(optimizer, tree, trees)

    scanned, alone = trained(optimizer, lambda x: x), trained(optimizer, layers_alone)
    unclipped = trained(dataclasses.replace(optimizer, clipping_threshold=1e9), layers_alone)
    clipped = 0
    for name in STACKED:
        for i in range(LAYERS):
            found, expected = scanned["layers"][name][i], np.asarray(alone["layers"][i][name])
            moved = np.abs(expected - start[name][i]).max()
            assert moved > 0
            np.testing.assert_allclose(found, expected, atol=1e-5 * moved, rtol=1e-6, err_msg=f"{name} {i}")
            clipped += np.abs(unclipped["layers"][i][name] - expected).max() > 0.1 * moved
    assert LAYERS < clipped < len(STACKED) * LAYERS  # some are clipped and some not
    np.testing.assert_array_equal(scanned["token"], alone["token"])


def test_a_stack_is_what_its_logical_axes_say():
    for model in (bert, t5):
        for scan in (False, True):
            variables = nnx.state(nnx.eval_shape(functools.partial(model, scan_layers=scan)), nnx.Param)
            named = nnx.to_flat_state(variables)
            found = [in_stack(tuple(map(jax.tree_util.DictKey, path))) for path, _ in named]
            assert found == [p.get_metadata()["logical_axes"][0] == "layers" for _, p in named]
            assert any(found) == scan and not all(found)


def t5(**changes):
    sizes = {"vocab_size": 64, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}
    backbone = T5Config(**sizes, **changes)
    return DualEncoderModel(DualEncoderConfig(backbone=backbone), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(128, 160), (127, 160), (7,)])
def test_adafactor_is_t5x_s(shape):
    rng = np.random.default_rng(1)
    x = rng.normal(size=shape).astype(np.float32) * 0.02
    gradients = [rng.normal(size=shape).astype(np.float32) * 10.0**-i for i in range(3)]
    found = apply(Adafactor(learning_rate=1e-2), {"kernel": x}, [{"kernel": g} for g in gradients])
    expected, factored = x.astype(np.float64), sum(n >= 128 for n in shape) == 2
    row = column = full = 0.0
    for t, g in enumerate(gradients, 1):
        decay, squares = 1 - t**-0.8, g.astype(np.float64) ** 2 + 1e-30
        if factored:
            row = decay * row + (1 - decay) * squares.mean(1)
            column = decay * column + (1 - decay) * squares.mean(0)
            second = row[:, None] * column / row.mean()
        else:
            full = decay * full + (1 - decay) * squares
            second = full
        update = g / np.sqrt(second)
        update /= max(1.0, np.sqrt((update**2).mean()) / 1.0)
        scale = max(np.sqrt((expected**2).mean()), 1e-3)
        expected = expected - 1e-2 * (11 - t) / 10 * scale * update
    assert np.abs(expected - x).max() > 1e-5
    np.testing.assert_allclose(found["kernel"], expected, rtol=1e-4, atol=1e-7)


def test_adafactor_clips_the_global_norm_where_it_is_asked_to():
    """The second gradient, a thousand times as large as the first, is clipped to the first's length."""
    rng = np.random.default_rng(2)
    params, first, second = (
        {"a": np.float32(rng.normal(size=5)), "b": np.float32(rng.normal(size=(3, 2)))} for _ in range(3)
    )
    norm, other = (float(optax.tree.norm(tree)) for tree in (first, second))
    small = jax.tree.map(lambda g: g * np.float32(norm / other), second)
    large = jax.tree.map(lambda g: 1000 * g, small)
    clipped = apply(Adafactor(learning_rate=0.1, clip_norm=norm), params, [first, large])
    plain = Adafactor(learning_rate=0.1)
    expected, unclipped = (apply(plain, params, [first, gradient]) for gradient in (small, large))
    for name, value in expected.items():
        assert np.abs(unclipped[name] - value).max() > 1e-3
        np.testing.assert_allclose(clipped[name], value, atol=1e-6)


def test_weight_decay_spares_biases_and_norms_of_real_models_only():
    for scan in (False, True):
        model = nnx.eval_shape(functools.partial(bert, scan_layers=scan))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        names = {}
        for path, flag in jax.tree_util.tree_leaves_with_path(decayed(params)):
            names.setdefault(flag, set()).add(path[-1].key)
        assert names[False] == {"bias", "scale"}
        assert names[True] and not names[True] & names[False]


@pytest.mark.parametrize("optimizer", [AdamW(), Adafactor(min_dim_size_to_factor=32)])
def test_moments_lie_like_their_parameters(optimizer):
    partitioner = MeshConfig(data=1, fsdp=2, tensor=2).build()
    model, built = Bag(), optimizer.build(10)
    plan = state_lib.plan_state(model, built.transform, partitioner)
    state = state_lib.initial_state(model, built.transform, plan)
    assert state.params["kernel"].sharding.spec == PartitionSpec("fsdp", "tensor")
    assert state.params["kernel"].addressable_shards[0].data.shape == (16, 16)
    found = 0
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(plan.shardings), strict=True):
        assert leaf.sharding == sharding
        found += leaf.shape == (64, 32) and not leaf.sharding.is_fully_replicated
    assert found == (3 if isinstance(optimizer, AdamW) else 1)
    if isinstance(optimizer, Adafactor):  # means of the table [vocab, embed] over each of its two dimensions
        means = state.opt_state[0].v_row["table"], state.opt_state[0].v_col["table"]
        assert [(x.shape, *x.sharding.spec) for x in means] == [((32,), "fsdp"), ((64,), "tensor")]
