"""Outlines: modules with shapes in place of their parameters' values."""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

M = TypeVar("M", bound=nnx.Module)

# Whether modules that are being made get shapes instead of values (`outline`).
_OUTLINING: contextvars.ContextVar[bool] = contextvars.ContextVar("outlining", default=False)


class _NeedsValues(Exception):
    """A module draws parameters by itself, so its outline needs a trace."""


class _NoRngs:
    def __getattr__(self, name: str) -> Any:
        raise _NeedsValues

    def __call__(self) -> Any:
        raise _NeedsValues


_NO_RNGS: Any = _NoRngs()


def outline(make: Callable[[nnx.Rngs], M]) -> M:
    """Returns the module `make(rngs)` with shapes (jax.ShapeDtypeStruct) in place of values.

    Modules of jaxir are made without a trace, in a twentieth of a trace's time. With a module of
    another library, such as flax.nnx.Linear, all of `make` is traced.
    """
    if _OUTLINING.get():
        return make(_NO_RNGS)
    token = _OUTLINING.set(True)
    try:
        return make(_NO_RNGS)
    except _NeedsValues:
        pass
    finally:
        _OUTLINING.reset(token)
    return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


def outlining() -> bool:
    """Returns whether `outline` is making a module without a trace."""
    return _OUTLINING.get()


def drawn(init: nnx.Initializer, rngs: nnx.Rngs, shape: Sequence[int]) -> jax.Array:
    """Returns initial values by `init`, or their shape in an `outline`."""
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32) if outlining() else init(rngs.params(), shape)


def filled(value: float, shape: Sequence[int]) -> jax.Array:
    """Returns initial values that are all `value`, or their shape in an `outline`."""
    if outlining():
        return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    return jnp.full(shape, value, jnp.float32)
