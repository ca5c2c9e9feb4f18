"""The settings of an object that are not fields of a dataclass, so that a resume compares them too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxir.training.run.function_code import is_installed_class

_PLAIN = (
    str | int | float | complex | bytes | bool | None | tuple | list | set | frozenset | Mapping | np.ndarray
)


def beyond_fields(value: Any, *, class_attributes: bool = True) -> dict[str, Any]:
    """Returns, by name, the settings of a user's object that are not fields of a dataclass.

    A user's object has a class that is neither jaxir's nor installed. Other objects give an empty dict: their
    versions, not their attributes, decide what they do.

    Args:
      value: an object.
      class_attributes: include attributes with plain values that the user's classes set in their bodies.
    """
    cls = type(value)
    if is_installed_class(cls):
        return {}
    fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    found = _of_classes(cls) if class_attributes else {}
    if not _is_frozen(cls) and not isinstance(value, nnx.Module | jax.Array):
        found |= getattr(value, "__dict__", {})
    computed = {name for parent in cls.__mro__ for name, x in vars(parent).items() if _is_cached(x)}
    return {name: x for name, x in sorted(found.items()) if name not in fields | computed}


def _is_frozen(cls: type) -> bool:
    """Returns whether a class is itself a frozen dataclass: all else that its objects have is derived."""
    return "__dataclass_fields__" in vars(cls) and cls.__dataclass_params__.frozen


def _is_cached(attribute: Any) -> bool:
    return isinstance(attribute, functools.cached_property)


def _of_classes(cls: type) -> dict[str, Any]:
    """Returns the plain attributes in the bodies of a class and of its parents that are not installed."""
    found: dict[str, Any] = {}
    for parent in reversed([c for c in cls.__mro__ if not is_installed_class(c)]):
        plain = {k: v for k, v in vars(parent).items() if k[:2] != "__" and isinstance(v, _PLAIN)}
        found |= plain
    return found
