"""jaxir's Adafactor takes the same steps as T5X's, whose equations are written out in numpy here.

Shazeer and Stern 2018, algorithms 4 and 5, with T5X's settings. Second moments decay by 1 - t^-0.8, have
1e-30 added, and are factored where both dimensions are at least 128. Updates are clipped to a root mean
square of 1, then multiplied by the learning rate and by the parameter's root mean square (at least 1e-3).
There is no momentum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxir.training.step.optimizers import Adafactor

pytestmark = pytest.mark.compiled

SHAPES = {
    "factored": (130, 192),
    "tall": (256, 128),
    "square": (128, 128),
    "narrow": (512, 16),
    "heads": (4, 32),
    "norm": (96,),
}


def rms(x: np.ndarray) -> np.float64:
    return np.sqrt(np.mean(np.square(x)))


def t5x_step(param, gradient, slots, step: int, learning_rate: float):
    """Returns a parameter and its slots after a step (from 0); slots are v_row and v_col, or v; first 0."""
    decay = 1.0 - (step + 1.0) ** -0.8
    squared = np.square(gradient) + 1e-30
    if "v" in slots:
        slots = {"v": decay * slots["v"] + (1 - decay) * squared}
        update = gradient / np.sqrt(slots["v"])
    else:
        shorter, longer = np.argsort(param.shape)
        slots = {
            "v_row": decay * slots["v_row"] + (1 - decay) * squared.mean(longer),
            "v_col": decay * slots["v_col"] + (1 - decay) * squared.mean(shorter),
        }
        row = np.expand_dims(slots["v_row"] / slots["v_row"].mean(), longer)
        column = np.expand_dims(slots["v_col"], shorter)
        update = gradient / np.sqrt(row) / np.sqrt(column)
    update /= max(1.0, rms(update))
    return param - learning_rate * max(rms(param), 1e-3) * update, slots


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 1e-4) for name in SHAPES), ("factored", 0.0), ("factored", 1.0)]
)
def test_adafactor_takes_the_steps_of_t5x(name, size):
    shape, steps = SHAPES[name], 5
    rng = np.random.default_rng(0)
    start = size * rng.normal(size=shape)
    gradients = [rng.normal(size=shape) * 10.0 ** rng.integers(-4, 3) for _ in range(steps)]
    built = Adafactor(learning_rate=1e-2, warmup_steps=2).build(steps)
    params = jnp.asarray(start, jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        state = built.transform.init(params)
        expected = start
        factored = len(shape) == 2 and min(shape) >= 128
        long, short = (max(shape), min(shape)) if factored else (1, 1)
        slots = {"v_row": np.zeros(short), "v_col": np.zeros(long)} if factored else {"v": np.zeros(shape)}
        for step, gradient in enumerate(gradients):
            updates, state = built.transform.update(jnp.asarray(gradient, jnp.float32), state, params)
            params = optax.apply_updates(params, updates)
            rate = float(built.schedule(step))
            expected, slots = t5x_step(expected, gradient, slots, step, rate)
    moved = np.abs(expected - start).max()
    assert moved > 0
    np.testing.assert_allclose(params, expected, atol=1e-4 * moved)
    kept = {field: getattr(state[0], field) for field in ("v", "v_row", "v_col")}
    for field, value in kept.items():
        if field in slots:
            np.testing.assert_allclose(value, slots[field], rtol=1e-4)
        else:
            assert value.shape == (1,)
