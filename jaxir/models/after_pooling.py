"""Modules of sentence-transformers that a dual encoder applies to a pooled vector, besides its projection."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Size, checked
from jaxir.models import layers
from jaxir.models.activations import ACTIVATIONS

Activation = Literal[
    "identity",
    "tanh",
    "gelu",
    "relu",
    "silu",
    "sigmoid",
    "leaky_relu",
    "elu",
    "selu",
    "celu",
    "softplus",
    "softsign",
    "mish",
    "relu6",
    "hard_tanh",
    "hard_swish",
    "hard_sigmoid",
    "log_sigmoid",
]
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    **{name: ACTIVATIONS[name] for name in ("gelu", "relu", "silu")},
    "sigmoid": jax.nn.sigmoid,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
    "mish": jax.nn.mish,
    "relu6": jax.nn.relu6,
    "hard_tanh": jax.nn.hard_tanh,
    "hard_swish": jax.nn.hard_swish,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
}
_LAYER_NORM_EPSILON = 1e-5  # torch.nn.LayerNorm's default, which sentence-transformers keeps


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AfterPooling:
    """The configuration of one module, which computes in float32.

    Attributes:
      kind: "dense" (a linear map and an activation), "normalize" (to length 1), "layer_norm", or "truncate"
        (keeps the first dimensions).
      dimension: number of dimensions after a "dense" or "truncate"; the other kinds keep the number.
      use_bias: whether a "dense" adds a bias.
      activation: the activation of a "dense".
      residual: whether a "dense" adds its input, through a second linear map if the dimensions differ.
    """

    kind: Literal["dense", "normalize", "layer_norm", "truncate"]
    dimension: Size | None = None
    use_bias: bool = True
    activation: Activation = "tanh"
    residual: bool = False

    def __post_init__(self):
        if (self.dimension is None) == (self.kind in ("dense", "truncate")):
            raise ValueError(
                f"{self.kind!r} has dimension {self.dimension}: give one for dense and truncate, else None"
            )

    def make(self, width: int, *, rngs: nnx.Rngs) -> nnx.Module:
        """Makes the module for vectors of `width` dimensions."""
        if self.kind == "dense":
            return _Dense(self, width, rngs=rngs)
        return _LayerNorm(width) if self.kind == "layer_norm" else _Fixed(self)


def width_after(modules: tuple[AfterPooling, ...], width: int) -> int:
    """Returns the dimensions of the vectors that come out of the last module."""
    for module in modules:
        width = width if module.dimension is None else module.dimension
    return width


@checked_shapes
def l2_normalize(x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Divides each row of x [B, D] by its length; a zero row stays zero and has a finite gradient."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-24))


class _Dense(nnx.Module):
    def __init__(self, module: AfterPooling, width: int, *, rngs: nnx.Rngs):
        def linear(*, use_bias: bool) -> layers.Linear:
            init = layers.normal(width**-0.5)
            how = {"axes": ("embed", "affinity"), "dtype": "float32", "init": init, "rngs": rngs}
            return layers.Linear(width, module.dimension, use_bias=use_bias, **how)

        self.linear = linear(use_bias=module.use_bias)
        self.residual = linear(use_bias=False) if module.residual and width != module.dimension else None
        self.activation, self.adds_input = module.activation, module.residual

    def __call__(self, x: jax.Array) -> jax.Array:
        y = FUNCTIONS[self.activation](self.linear(x))
        if not self.adds_input:
            return y
        return y + (x if self.residual is None else self.residual(x))


class _LayerNorm(nnx.Module):
    def __init__(self, width: int):
        self.norm = layers.LayerNorm(width, epsilon=_LAYER_NORM_EPSILON, dtype="float32")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x[:, None])[:, 0]


class _Fixed(nnx.Module):
    """A module without parameters."""

    def __init__(self, module: AfterPooling):
        self.dimension = module.dimension

    def __call__(self, x: jax.Array) -> jax.Array:
        return l2_normalize(x) if self.dimension is None else x[:, : self.dimension]
