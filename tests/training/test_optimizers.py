"""Optimizers against steps computed by hand in numpy, schedules against their values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from tiny_run import Bag, bert

from jaxir.errors import UserError
from jaxir.partitioning import MeshConfig
from jaxir.training import state as state_lib
from jaxir.training.optimizers import Adafactor, AdamW, decayed, linear_schedule


def apply(optimizer, params, gradients):
    """Returns the parameters after one step for each tree of gradients, of a run of 10 steps."""
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
    np.testing.assert_allclose(rates[:4], [0.5, 1.0, 1.5, 2.0])
    np.testing.assert_allclose(rates[4:], [2.0 * (12 - t) / 8 for t in range(4, 13)], rtol=1e-6)
    without = linear_schedule(1e-3, warmup_steps=0, steps=10)
    np.testing.assert_allclose([float(without(t)) for t in (0, 5, 10)], [1e-3, 5e-4, 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (AdamW(warmup_steps=10), "warmup_steps must be at least 0 and less than the 10 steps"),
        (AdamW(learning_rate=-1.0), "learning_rate must be a finite number"),
        (Adafactor(learning_rate=float("nan")), "learning_rate must be a finite number"),
        (AdamW(clip_norm=0.0), "clip_norm must be above 0"),
    ],
)
def test_settings_out_of_range_cost_a_sentence(optimizer, sentence):
    with pytest.raises(UserError, match=sentence):
        optimizer.build(10)


def test_adamw_is_the_equations_with_clipping_and_no_decay_of_biases():
    rng = np.random.default_rng(0)
    params = {"layer": {"kernel": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    gradients = [
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params) for _ in range(3)
    ]
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


@pytest.mark.parametrize("shape", [(128, 160), (127, 160), (7,), (3, 128, 160)])
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
            row = decay * row + (1 - decay) * squares.mean(-1)
            column = decay * column + (1 - decay) * squares.mean(-2)
            second = row[..., None] * column[..., None, :] / row.mean(-1)[..., None, None]
        else:
            full = decay * full + (1 - decay) * squares
            second = full
        update = g / np.sqrt(second)
        update /= max(1.0, np.sqrt((update**2).mean()) / 1.0)
        scale = max(np.sqrt((expected**2).mean()), 1e-3)
        expected = expected - 1e-2 * (11 - t) / 10 * scale * update
    assert np.abs(expected - x).max() > 1e-5
    np.testing.assert_allclose(found["kernel"], expected, rtol=1e-4, atol=1e-7)


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
