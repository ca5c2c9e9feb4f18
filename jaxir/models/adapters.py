"""LoRA: trained low-rank additions to the frozen dense layers of an encoder (Hu et al. 2021,
arXiv:2106.09685)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Count, Positive, checked
from jaxir.models import layers, outlines

ALL = "all"  # the target that means every dense layer of the blocks
NAME = "adapter"  # attribute of a `layers.Linear`, and so part of its parameters' names
_ENCODERS = ("encoder", "query_encoder", "passage_encoder", "decoder")
# Parts of a model outside its encoders that stay frozen while adapters are trained. Any other part outside
# the encoders is a head, which is trained with the adapters. "head.embedding" is the output table of a
# generator.
_FROZEN = ("head.embedding", "query_weights")
_FROZEN_ENDS = ("after_pooling", "layer_weights")
_LAYER = re.compile(r"(^|\.)layers\.(?:\d+\.|of_[\d_]+\.)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Adapters:
    """The dense layers that have an adapter, and the adapters' size: y = x W + b + (alpha / rank) x A B.

    Attributes:
      rank: r, the number of columns of A [I, r] and of rows of B [r, O].
      alpha: the numerator of the factor alpha / rank.
      targets: names of dense layers, such as "query" or "attention.query"; "all" means all of the encoder.
    """

    rank: Count
    alpha: Positive
    targets: tuple[str, ...] = (ALL,)

    def __post_init__(self):
        object.__setattr__(self, "targets", tuple(self.targets))  # jaxir.json stores a tuple as a list

    @property
    def factor(self) -> float:
        return self.alpha / self.rank

    def apply_to(self, module: str) -> bool:
        """Returns whether the dense layer with this dotted name has an adapter."""
        return any(target == ALL or f".{module}".endswith(f".{target}") for target in self.targets)


class Adapter(nnx.Module):
    """The addition (alpha / rank) x A B to a dense layer. `down` is A [I, r]; `up`, first 0, is B [r, O]."""

    def __init__(self, linear: layers.Linear, adapters: Adapters, *, rngs: nnx.Rngs):
        *stack, inputs, outputs = linear.kernel.shape
        *stacked, of_inputs, of_outputs = linear.kernel.get_metadata()["logical_axes"]
        down = outlines.drawn(initial_down, rngs, (*stack, inputs, adapters.rank))
        self.down = layers.param(down, *stacked, of_inputs, None)
        self.up = layers.param(
            outlines.filled(0, (*stack, adapters.rank, outputs)), *stacked, None, of_outputs
        )
        self.factor, self.dtype = adapters.factor, linear.dtype

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        inside = layers.linear(x, layers.weight(self.down, self.dtype), None)
        return layers.linear(inside * self.factor, layers.weight(self.up, self.dtype), None)


def initial_down(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns A [..., I, r] from U(-1/sqrt(I), 1/sqrt(I)), as PEFT draws it."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def attach(model: nnx.Module, adapters: Adapters | None, *, rngs: nnx.Rngs) -> None:
    """Adds an adapter to each dense layer that `adapters` names.

    Raises:
      UserError: a target names no dense layer of the encoders.
    """
    if adapters is None:
        return
    found: dict[str, list[layers.Linear]] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, layers.Linear) and path[0] in _ENCODERS:
            found.setdefault(any_layer(".".join(map(str, path))), []).append(module)
    for target in adapters.targets:
        alone = dataclasses.replace(adapters, targets=(target,))
        if not any(map(alone.apply_to, found)):
            known = sorted({within_encoder(name) for name in found})
            raise UserError(
                f"lora_targets: no dense layer of the encoder is called {target!r}{suggest(target, known)};"
                f" there are {', '.join(known)}; {ALL!r} means all of them"
            )
    for module in itertools.chain(*(of for name, of in found.items() if adapters.apply_to(name))):
        module.adapter = Adapter(module, adapters, rngs=rngs)


def any_layer(name: str) -> str:
    """Returns the name of a parameter or module without its layer's number, also in a scanned stack."""
    return _LAYER.sub(r"\1layers.", name)


def within_encoder(name: str) -> str:
    """Returns a dense layer's name without its encoder's name and its layer's number: "attention.query"."""
    *_, last = any_layer(name).rpartition("layers.")
    first, _, rest = last.partition(".")
    return rest if first in _ENCODERS else last


def is_adapter(name: str) -> bool:
    """Returns whether a parameter of this dotted name belongs to an adapter."""
    return name.split(".")[-2:-1] == [NAME]


def is_base(name: str) -> bool:
    """Returns whether a parameter is frozen if its model has adapters: it is in no adapter and no head."""
    first = name.split(".")[0]
    in_base = first in _ENCODERS or first.endswith(_FROZEN_ENDS) or name.startswith(_FROZEN)
    return in_base and not is_adapter(name)


def adapted(names: Iterable[str]) -> list[str]:
    """Returns the names of the dense layers whose adapters' parameters are among `names`."""
    return sorted({name.rpartition(f".{NAME}.")[0] for name in names if is_adapter(name)})
