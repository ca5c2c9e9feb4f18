"""Values of simple types, as flags and gin files give them: what fits a type hint, and the hint in words."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "None"}


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the type hints of the parameters of a function or class; {} where they cannot be resolved."""
    try:
        hints = typing.get_type_hints(function)
        if inspect.isclass(function) and "__init__" in vars(function):
            hints |= typing.get_type_hints(function.__init__)
        return hints
    except (NameError, TypeError, AttributeError):  # names that only type checkers import
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a parameter may have this value; True where the hint is of no simple type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, arm) for arm in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in WORDS else True


def in_words(hint: Any) -> str:
    """Returns a type hint of simple types as a user would say it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = [arm for arm in typing.get_args(hint) if not (arm is int and float in typing.get_args(hint))]
        return " or ".join(map(in_words, arms))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return WORDS.get(hint, "something else")
