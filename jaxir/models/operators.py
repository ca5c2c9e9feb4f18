"""Functions that an exported graph may compute by one operator of its format."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive

F = TypeVar("F", bound=Callable[..., jax.Array])
Watcher = Callable[[str, tuple[Any, ...]], None]  # called with an operator's name and positional arguments
_named = contextvars.ContextVar("_named", default=False)
_watcher = contextvars.ContextVar[Watcher | None]("_watcher", default=None)


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Traces each `operator` as one equation of its name, without its inner operations.

    Such a program can neither be compiled nor differentiated: an exporter replaces the equations.
    """
    token = _named.set(True)
    try:
        yield
    finally:
        _named.reset(token)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Calls `watcher` before each call of an `operator`."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def operator(function: F) -> F:
    """Makes `named` programs show a function as the primitive "jaxir.NAME".

    Positional arguments are arrays or None; keyword arguments are static. The equation's parameters are the
    keyword arguments and `given`, which says for each positional argument whether it is an array.
    """
    primitive = Primitive(f"jaxir.{function.__name__}")

    def compute(*arrays: jax.Array, given: tuple[bool, ...], **settings: Any) -> jax.Array:
        rest = iter(arrays)
        return function(*(next(rest) if is_array else None for is_array in given), **settings)

    def shape_of(*arrays: Any, **params: Any) -> jax.core.ShapedArray:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        found = jax.eval_shape(functools.partial(compute, **params), *shapes)
        return jax.core.ShapedArray(found.shape, found.dtype)

    primitive.def_abstract_eval(shape_of)

    @functools.wraps(function)
    def call(*args: jax.Array | None, **settings: Any) -> jax.Array:
        if (watcher := _watcher.get()) is not None:
            watcher(function.__name__, args)
        if not _named.get():
            return function(*args, **settings)
        given = tuple(a is not None for a in args)
        return primitive.bind(*(a for a in args if a is not None), given=given, **settings)

    return call
