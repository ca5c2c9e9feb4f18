"""Checks of the shapes and types of arrays at the edges of modules."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")


def checked_shapes(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: checks arguments and result against their annotations, such as Float[Array, "B D"].

    The first call builds the checker. Building all checkers at import would take a tenth of a command's
    start, and most are for code that a command does not run.

    Raises:
      jaxtyping.TypeCheckError: in a call with an array of another type or shape.
    """
    checked: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal checked
        if checked is None:
            from beartype import beartype
            from jaxtyping import jaxtyped

            checked = jaxtyped(typechecker=beartype)(function)
        return checked(*args, **kwargs)

    return call
