"""A weighted sum of objectives: multi-task training."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import Feature, Features, TextFormat, fields_of
from jaxir.core.values import Count, Natural, NotNegative, checked
from jaxir.objectives.objective import (
    Batch,
    Corpus,
    InSteps,
    Metrics,
    Objective,
    RandomKey,
    auxiliary_of,
    loss_and_metrics,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Ramp:
    """A weight that changes linearly from `start` to `end` over `steps` steps, beginning at step `first`.

    Attributes:
      start: the weight before the change.
      end: the weight after the change, and in evaluation.
      steps: the number of steps that the change takes.
      first: the last step with the value `start`.
    """

    start: float
    end: float
    steps: Count
    first: Natural = 0

    def __call__(self, step: jax.Array | None) -> jax.Array:
        """Returns the weight at `step`, a float32 scalar; `step` is None in evaluation."""
        if step is None:
            return jnp.float32(self.end)
        part = jnp.clip((step - self.first).astype(jnp.float32) / self.steps, 0.0, 1.0)
        return self.start + (self.end - self.start) * part


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WeightedSum(Objective):
    """The sum of weight * loss over several objectives.

    Each objective has its own auxiliary parameters and random numbers; a batch has the features of all.
    Metrics are those of each objective, as `NAME/metric`, then `NAME/loss`, and `NAME/weight` if the weight
    depends on the step.

    Attributes:
      parts: objectives by name.
      weights: the weight of each objective, by name: a number, or a function of the step (None in evaluation)
        such as `Ramp`; the default is 1.
    """

    parts: Mapping[str, Objective]
    weights: Mapping[str, NotNegative | Callable[[jax.Array | None], jax.Array]] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        if not self.parts:
            raise UserError("a sum of objectives needs at least one objective in `parts`")
        for name in self.parts:
            if not name.isidentifier():
                raise UserError(
                    f"the name of an objective in a sum must be a Python identifier, not {name!r}"
                )
            if getattr(self.parts[name], "chunks", 1) == "auto":
                raise UserError(f'objective {name!r} of a sum cannot have chunks="auto": give a number')
        for name, weight in self.weights.items():
            if name not in self.parts:
                raise UserError(
                    f"weights names {name!r}, but the sum only has {', '.join(self.parts)}: correct it"
                )
            if callable(weight):
                _check_takes_step(weight, name)
        if not any(self.weights.get(name, 1) for name in self.parts):
            raise UserError("all weights of a sum of objectives are 0, so the loss is 0: set one above 0")

    @property
    def frozen(self) -> tuple[str, ...]:
        """The objectives' patterns of untrained parameters, with the objective's name after `auxiliary.`."""
        return tuple(
            pattern.replace("auxiliary.", f"auxiliary.{name}.", 1)
            for name, part in self.parts.items()
            for pattern in part.frozen
        )

    @property
    def evaluated_on_pairs(self) -> bool:
        return all(part.evaluated_on_pairs for part in self.parts.values())

    @property
    def searched_on_pairs(self) -> bool:
        return all(part.searched_on_pairs for part in self.parts.values())

    def check_model(self, model: Any) -> None:
        for part in self.parts.values():
            part.check_model(model)

    def settled(self, in_steps: InSteps) -> Self:
        return dataclasses.replace(self, parts={n: part.settled(in_steps) for n, part in self.parts.items()})

    def features(self, form: TextFormat) -> Features:
        """Returns the features of all objectives of the sum.

        Raises:
          UserError: two objectives define a feature with the same name, or read the same field, differently.
        """
        found: dict[str, Feature] = {}
        for part in self.parts.values():
            for name, feature in part.features(form).items():
                if found.setdefault(name, feature) != feature:
                    raise UserError(
                        f"objectives of a sum disagree on the feature {name}: {found[name]} and {feature};"
                        " train them in separate runs"
                    )
        try:
            fields_of(found)
        except ValueError as error:
            raise UserError(f"objectives of a sum disagree: {error}; train them in separate runs") from error
        return found

    def auxiliary(self, model: nnx.Module, *, form: TextFormat, rngs: nnx.Rngs) -> nnx.Module | None:
        made = {name: auxiliary_of(part, model, form=form, rngs=rngs) for name, part in self.parts.items()}
        made = {name: module for name, module in made.items() if module is not None}
        return _Parts(made) if made else None

    def read_corpus(self, auxiliary: Any, data: Corpus) -> None:
        for name, part in self.parts.items():
            part.read_corpus(_of_part(auxiliary, name), data)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        total, metrics = jnp.float32(0), {}
        for number, (name, part) in enumerate(self.parts.items()):
            own = None if key is None else jax.random.fold_in(key, number)
            loss, found = loss_and_metrics(part, model, batch, own, _of_part(auxiliary, name), step)
            weight = self.weights.get(name, 1.0)
            found = {**found, "loss": loss}
            if callable(weight):
                found["weight"] = weight = _at(step, weight, name)
            total += loss * weight
            metrics |= {f"{name}/{metric}": value for metric, value in found.items()}
        return total, metrics


def _at(step: jax.Array | None, weight: Callable[[jax.Array | None], jax.Array], name: str) -> jax.Array:
    """Returns the weight of the objective `name` at a step; raises a UserError unless it is one number."""
    try:
        found = weight(step)
    except TypeError as error:
        if step is not None:
            raise
        raise UserError(
            f"the weight of {name!r} must accept the step None, with which evaluation calls it: {error}"
        ) from error
    if not isinstance(found, numbers.Real | jax.Array) or jnp.shape(found) != ():
        what = f"an array {list(found.shape)}" if isinstance(found, jax.Array) else repr(found)
        raise UserError(f"the weight of {name!r} must return one number for a step, not {what}")
    return found


def _check_takes_step(weight: Callable[..., Any], name: str) -> None:
    with contextlib.suppress(ValueError):  # a function written in C may have no signature
        try:
            inspect.signature(weight).bind(None)
        except TypeError as error:
            raise UserError(f"the weight of {name!r} must be a function of the step: {error}") from error


def _of_part(auxiliary: Any, name: str) -> Any:
    """Returns the auxiliary module of the objective `name` of the sum, or None."""
    # Do not use getattr: `name` may equal the name of a method of every module, such as `train`.
    return None if auxiliary is None else vars(auxiliary).get(name)


class _Parts(nnx.Module):
    def __init__(self, parts: Mapping[str, nnx.Module]):
        for name, module in parts.items():
            setattr(self, name, module)
