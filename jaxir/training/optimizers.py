"""AdamW and Adafactor through optax, with linear warm-up and linear decay to zero at the final step."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxir.errors import UserError

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
NEVER_DECAYED = ("bias", "scale")


class BuiltOptimizer(NamedTuple):
    """An optimizer for a run of known length.

    Attributes:
      transform: gradients -> updates; clipping, moments and the learning rate are inside.
      schedule: number of finished steps -> the learning rate of the next one, float32 [].
    """

    transform: optax.GradientTransformation
    schedule: Schedule


def linear_schedule(learning_rate: float, *, warmup_steps: int, steps: int) -> Schedule:
    """Returns the learning rate at each step: up in a line to `learning_rate`, then down in a line to zero.

    Step t (from 0) of the warm-up has learning_rate * (t + 1) / warmup_steps, so that no step is wasted at
    rate zero; step t after it has learning_rate * (steps - t) / (steps - warmup_steps), which is the full
    rate at t = warmup_steps and zero at t = steps, when training is over.

    Raises:
      UserError: a negative or infinite rate, or a warm-up that is negative or not shorter than the run.
    """
    if not 0 <= learning_rate < float("inf"):
        raise UserError(f"learning_rate must be a finite number of at least 0, not {learning_rate}")
    if not 0 <= warmup_steps < steps:
        raise UserError(
            f"warmup_steps must be at least 0 and less than the {steps} steps of the run, not {warmup_steps}"
        )

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(step, jnp.float32)
        up = (t + 1.0) / max(warmup_steps, 1)
        down = (steps - t) / (steps - warmup_steps)
        return learning_rate * jnp.maximum(0.0, jnp.where(t < warmup_steps, up, down))

    return schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2).

    Attributes:
      learning_rate: the highest rate, at the end of the warm-up.
      warmup_steps: steps of linear warm-up.
      weight_decay: pull of each weight towards zero, times the learning rate; not for biases and norm scales.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      clip_norm: the global norm to which larger gradients are scaled down; None clips nothing.
    """

    learning_rate: float = 2e-5
    warmup_steps: int = 0
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float | None = 1.0

    def build(self, steps: int) -> BuiltOptimizer:
        """Returns the optimizer of a run of `steps` steps.

        Raises:
          UserError: settings out of range.
        """
        schedule = linear_schedule(self.learning_rate, warmup_steps=self.warmup_steps, steps=steps)
        adamw = optax.adamw(
            schedule, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=decayed
        )
        return BuiltOptimizer(_clipped(adamw, self.clip_norm), schedule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5) with T5X's settings.

    No momentum; updates are clipped to a root mean square of 1 and multiplied by that of the parameter (at
    least 1e-3). A parameter is taken as one block: the root mean squares of a scanned stack are over all
    its layers.

    Attributes:
      learning_rate: the highest rate, relative to the scale of each parameter.
      warmup_steps: steps of linear warm-up.
      decay_rate: the second moment's decay at step t (from 1) is 1 - t ** -decay_rate.
      clipping_threshold: root mean square to which larger updates are scaled down.
      min_dim_size_to_factor: second moments are kept as row and column means where both are at least this
        long.
      clip_norm: the global norm to which larger gradients are scaled down; None (as in T5X) clips nothing.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay_rate: float = 0.8
    clipping_threshold: float = 1.0
    min_dim_size_to_factor: int = 128
    clip_norm: float | None = None

    def build(self, steps: int) -> BuiltOptimizer:
        """Returns the optimizer of a run of `steps` steps.

        Raises:
          UserError: settings out of range.
        """
        schedule = linear_schedule(self.learning_rate, warmup_steps=self.warmup_steps, steps=steps)
        adafactor = optax.adafactor(
            schedule,
            min_dim_size_to_factor=self.min_dim_size_to_factor,
            decay_rate=self.decay_rate,
            clipping_threshold=self.clipping_threshold,
            multiply_by_parameter_scale=True,
            momentum=None,
        )
        return BuiltOptimizer(_clipped(adafactor, self.clip_norm), schedule)


Optimizer = AdamW | Adafactor


def decayed(params: Any) -> Any:
    """Returns a tree of bools: which parameters weight decay applies to (all but biases and norm scales)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NEVER_DECAYED, params)


def _clipped(transform: optax.GradientTransformation, norm: float | None) -> optax.GradientTransformation:
    if norm is None:
        return transform
    if norm <= 0:
        raise UserError(f"clip_norm must be above 0 or None, not {norm}")
    return optax.chain(optax.clip_by_global_norm(norm), transform)
