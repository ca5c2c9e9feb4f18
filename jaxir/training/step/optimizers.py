"""AdamW and Adafactor through optax, with linear warm-up and, by default, linear decay to zero.

Adafactor treats each layer of a scanned stack as a separate parameter, so scanning does not change training.
"""

import dataclasses
import fnmatch
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Count, NotNegative, Positive, Rate, Warmup, checked
from jaxir.training.step.length import in_steps
from jaxir.training.step.parameter_partition import name_of

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
NEVER_DECAYED = ("bias", "scale")  # last parts of names of parameters without weight decay
LEAST_RATE = 1e-8  # the lowest rate in T5X's schedule
Groups = Mapping[str, Mapping[str, Any]]


class BuiltOptimizer(NamedTuple):
    """An optimizer for a run of known length.

    Attributes:
      transform: maps gradients to updates, including clipping, moments and the learning rate.
      schedule: maps the number of finished steps to the learning rate of the next step, float32 [].
    """

    transform: optax.GradientTransformation
    schedule: Schedule


def linear_schedule(
    learning_rate: float, *, warmup_steps: int, steps: int, unfinished: bool = False
) -> Schedule:
    """Returns a schedule: the rate rises linearly to `learning_rate`, then falls linearly to zero.

    Step t (from 0) of the warm-up has learning_rate * (t + 1) / warmup_steps. Step t after it has
    learning_rate * (steps - t) / (steps - warmup_steps): the full rate at t = warmup_steps, zero at t =
    steps. If `unfinished` is true, the warm-up may be longer than the run.
    """
    if not unfinished:
        _check_warmup(warmup_steps, steps)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(step, jnp.float32)
        up = (t + 1.0) / max(warmup_steps, 1)
        down = (steps - t) / max(steps - warmup_steps, 1)
        return learning_rate * jnp.maximum(0.0, jnp.where(t < warmup_steps, up, down))

    return schedule


def inverse_sqrt_schedule(learning_rate: float, *, warmup_steps: int) -> Schedule:
    """Returns a schedule: the rate rises linearly, then falls with the inverse square root of the step.

    Step t (from 1) has learning_rate * min(t / warmup_steps, (t / warmup_steps) ** -0.5), whatever the length
    of the run (Vaswani et al. 2017, arXiv:1706.03762, equation 3).
    """
    if warmup_steps < 1:
        raise UserError('decay="inverse_sqrt" requires a warm-up: set warmup_steps to at least 1')

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        part = (jnp.asarray(step, jnp.float32) + 1.0) / warmup_steps
        return learning_rate * jnp.minimum(part, jax.lax.rsqrt(part))

    return schedule


def t5x_schedule(
    learning_rate: float, *, warmup_steps: int, steps: int, decay_factor: float | None = None
) -> Schedule:
    """Returns the schedule of T5X's `utils.create_learning_rate_scheduler` with factors "linear_decay".

    Step t (from 0) has learning_rate * min(t / warmup_steps, 1 - decay_factor * (t - warmup_steps)), at least
    1e-8.

    Args:
      learning_rate: the highest rate; `base_learning_rate` in T5X.
      warmup_steps: number of steps in which the rate rises. With 0, which T5X does not support, training
        starts at the full rate.
      steps: number of steps of the run.
      decay_factor: share of the highest rate that each step after the warm-up subtracts; by default such that
        the rate is 0 at `steps`.
    """
    _check_warmup(warmup_steps, steps)
    fall = 1.0 / (steps - warmup_steps) if decay_factor is None else decay_factor

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(step, jnp.float32)
        up = t / warmup_steps if warmup_steps else jnp.float32(1.0)
        down = 1.0 + fall * (warmup_steps - t)
        return jnp.maximum(learning_rate * jnp.minimum(up, down), min(LEAST_RATE, learning_rate))

    return schedule


def _check_warmup(warmup_steps: int, steps: int) -> None:
    if not 0 <= warmup_steps < steps:
        raise UserError(
            f"warmup_steps must be at least 0 and less than the {steps} steps of the run, not {warmup_steps}"
        )


def _in_steps(warmup: float, steps: int) -> int:
    """Returns the number of warm-up steps; if `warmup` is a share, at least one step follows the warm-up."""
    return min(in_steps("warmup_steps", warmup, steps), steps - 1 if warmup < 1 else sys.maxsize)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2).

    Attributes:
      learning_rate: the highest rate, at the end of the warm-up.
      warmup_steps: steps of linear warm-up; below 1, a share of all steps.
      weight_decay: share of each weight subtracted at each step, times the learning rate; not for biases and
        norm scales.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      clip_norm: the global norm to which larger gradients are scaled down; None clips nothing.
      decay: how the rate falls after the warm-up: linearly to zero at the end of the run, or with the inverse
        square root of the steps, which requires a warm-up.
      unfinished_warmup: whether a run may be shorter than its warm-up; with inverse_sqrt it always may be.
      groups: other values of these settings for some parameters, by a pattern of names, such as
        {"auxiliary.*": {"learning_rate": 1e-3}}. The first pattern that matches a name is used. Each group's
        gradients are clipped separately.
    """

    learning_rate: NotNegative = 2e-5
    warmup_steps: Warmup = 0
    weight_decay: NotNegative = 0.01
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NotNegative = 1e-8
    clip_norm: Positive | None = 1.0
    decay: Literal["linear", "inverse_sqrt"] = "linear"
    unfinished_warmup: bool = False
    groups: Groups | None = None

    def build(self, steps: int) -> BuiltOptimizer:
        """Returns the optimizer for a run of `steps` steps."""
        if self.groups:
            return _in_groups(self, steps)
        warmup_steps = _in_steps(self.warmup_steps, steps)
        if self.decay == "inverse_sqrt":
            # A run of one step may be entirely warm-up.
            warmup_steps = max(warmup_steps, 1 if 0 < self.warmup_steps < 1 else 0)
            schedule = inverse_sqrt_schedule(self.learning_rate, warmup_steps=warmup_steps)
        else:
            schedule = linear_schedule(
                self.learning_rate, warmup_steps=warmup_steps, steps=steps, unfinished=self.unfinished_warmup
            )
        adamw = optax.adamw(
            schedule, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=decayed
        )
        return BuiltOptimizer(_clipped(adamw, self.clip_norm), schedule)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Adafactor:
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5) with T5X's settings.

    There is no momentum. Updates are clipped to a root mean square of 1 and multiplied by the parameter's
    root mean square (at least 1e-3). Each layer of a scanned stack is treated as a separate parameter. The
    learning rate follows `t5x_schedule`.

    Attributes:
      learning_rate: the highest rate, relative to the scale of each parameter.
      warmup_steps: steps of linear warm-up, from 0; below 1, a share of all steps.
      decay_factor: share of the highest rate that each step after the warm-up subtracts; by default such that
        the rate is 0 at the end of training.
      decay_rate: the second moment's decay at step t (from 1) is 1 - t ** -decay_rate.
      clipping_threshold: root mean square to which larger updates are scaled down.
      min_dim_size_to_factor: a parameter's second moments are kept as row and column means if its two largest
        dimensions are at least this large.
      clip_norm: the global norm to which larger gradients are scaled down; None (as in T5X) clips nothing.
      groups: other values of these settings for some parameters, as in `AdamW`.
    """

    learning_rate: NotNegative = 1e-3
    warmup_steps: Warmup = 0
    decay_factor: NotNegative | None = None
    decay_rate: Positive = 0.8
    clipping_threshold: Positive = 1.0
    min_dim_size_to_factor: Count = 128
    clip_norm: Positive | None = None
    groups: Groups | None = None

    def build(self, steps: int) -> BuiltOptimizer:
        """Returns the optimizer for a run of `steps` steps."""
        if self.groups:
            return _in_groups(self, steps)
        schedule = t5x_schedule(
            self.learning_rate,
            warmup_steps=_in_steps(self.warmup_steps, steps),
            steps=steps,
            decay_factor=self.decay_factor,
        )
        second_moments = optax.scale_by_factored_rms(
            decay_rate=self.decay_rate, min_dim_size_to_factor=self.min_dim_size_to_factor
        )
        # The same chain as in optax.adafactor.
        adafactor = optax.chain(
            per_layer(second_moments),
            per_layer(optax.clip_by_block_rms(self.clipping_threshold)),
            optax.scale_by_learning_rate(schedule, flip_sign=False),
            per_layer(optax.scale_by_param_block_rms()),
            optax.scale(-1),
        )
        return BuiltOptimizer(_clipped(adafactor, self.clip_norm), schedule)


Optimizer = AdamW | Adafactor


def _in_groups(optimizer: Optimizer, steps: int) -> BuiltOptimizer:
    """Returns an optimizer that applies each group's settings to the parameters that match its pattern."""
    known = [f.name for f in dataclasses.fields(optimizer) if f.name != "groups"]
    rest = dataclasses.replace(optimizer, groups=None)
    built = {"": rest.build(steps)}
    for pattern, changes in optimizer.groups.items():
        for name in changes:
            if name not in known:
                raise UserError(f"optimizer group {pattern!r}: no setting {name!r}{suggest(name, known)}")
        try:
            built[pattern] = dataclasses.replace(rest, **changes).build(steps)
        except UserError as error:
            raise UserError(f"optimizer group {pattern!r}: {error}") from error

    def group_of(name: str) -> str:
        return next((p for p in optimizer.groups if fnmatch.fnmatchcase(name, p)), "")

    def labels(params: Any) -> Any:
        names = jax.tree_util.tree_map_with_path(lambda path, _: name_of([key.key for key in path]), params)
        found, flat = jax.tree.map(group_of, names), jax.tree.leaves(names)
        for pattern in optimizer.groups:
            if pattern not in jax.tree.leaves(found):
                if taken := fnmatch.filter(flat, pattern):
                    raise UserError(
                        f"optimizer group {pattern!r}: all of its parameters belong to an earlier group, such"
                        f" as {taken[0]} to {group_of(taken[0])!r}; the first pattern that matches is used:"
                        f" put {pattern!r} first"
                    )
                raise UserError(f"optimizer group {pattern!r} matches no parameter{suggest(pattern, flat)}")
        return found

    transform = optax.partition({pattern: group.transform for pattern, group in built.items()}, labels)
    return BuiltOptimizer(transform, built[""].schedule)


def decayed(params: Any) -> Any:
    """Returns a tree of bools: weight decay applies to all parameters except biases and norm scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NEVER_DECAYED, params)


def in_stack(path: Sequence[Any]) -> bool:
    """Returns whether a parameter is in a scanned stack, so that its first dimension is the layers."""
    names = [str(key.key) for key in path]
    return any(a == "layers" and not b.isdigit() for a, b in itertools.pairwise(names))


def per_layer(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `transform`, changed to treat each layer of a scanned stack as a separate parameter.

    `transform` must treat each parameter separately; its state is empty or a `FactoredState`.
    """

    def along(params: Any) -> tuple[Any, Any]:
        # The dimensions that vmap maps over, for parameters and for the state; None outside stacks.
        axes = jax.tree_util.tree_map_with_path(lambda path, _: 0 if in_stack(path) else None, params)
        state = jax.eval_shape(transform.init, params)
        factored = isinstance(state, optax.FactoredState)
        return axes, optax.FactoredState(count=None, v_row=axes, v_col=axes, v=axes) if factored else state

    def init(params: Any) -> Any:
        axes, state_axes = along(params)
        if not jax.tree.leaves(axes):
            return transform.init(params)
        return jax.vmap(transform.init, in_axes=(axes,), out_axes=state_axes)(params)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        axes, state_axes = along(params)
        if not jax.tree.leaves(axes):
            return transform.update(updates, state, params)
        mapped = jax.vmap(transform.update, in_axes=(axes, state_axes, axes), out_axes=(axes, state_axes))
        return mapped(updates, state, params)

    return optax.GradientTransformation(init, update)


def _clipped(transform: optax.GradientTransformation, norm: float | None) -> optax.GradientTransformation:
    if norm is None:
        return transform
    return optax.chain(optax.clip_by_global_norm(norm), transform)
