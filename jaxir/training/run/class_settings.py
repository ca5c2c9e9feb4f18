"""Settings of an object that are not fields of a dataclass, so that a resume compares them too."""

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

    A user's object has a class that is neither jaxir's nor installed. For other objects, the result is empty:
    their versions decide what they do. With `class_attributes` it includes plain values set in the bodies of
    classes.
    """
    cls = type(value)
    if is_installed_class(cls):
        return {}
    found: dict[str, Any] = {}
    for parent in reversed([c for c in cls.__mro__ if class_attributes and not is_installed_class(c)]):
        found |= {k: v for k, v in vars(parent).items() if k[:2] != "__" and isinstance(v, _PLAIN)}
    # Whatever else an object of a frozen dataclass holds is derived from its fields.
    frozen = "__dataclass_fields__" in vars(cls) and cls.__dataclass_params__.frozen
    if not frozen and not isinstance(value, nnx.Module | jax.Array):
        found |= getattr(value, "__dict__", {})
    left_out = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    for parent in cls.__mro__:
        left_out |= {name for name, x in vars(parent).items() if isinstance(x, functools.cached_property)}
    return {name: x for name, x in sorted(found.items()) if name not in left_out}
