"""Settings of user-defined objects that are not dataclass fields; a resumed run compares them, too."""

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
    """Returns, by name, the settings of a user-defined object that are not dataclass fields.

    Objects of jaxir's or of an installed package's classes have no such settings: the version of the package
    determines what they do. With `class_attributes`, plain values set in the bodies of classes are included.
    """
    cls = type(value)
    if is_installed_class(cls):
        return {}
    found: dict[str, Any] = {}
    for parent in reversed([c for c in cls.__mro__ if class_attributes and not is_installed_class(c)]):
        found |= {k: v for k, v in vars(parent).items() if k[:2] != "__" and isinstance(v, _PLAIN)}
    # Attributes of a frozen dataclass that are not fields are derived from its fields.
    frozen = "__dataclass_fields__" in vars(cls) and cls.__dataclass_params__.frozen
    if not frozen and not isinstance(value, nnx.Module | jax.Array):
        found |= getattr(value, "__dict__", {})
    left_out = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    for parent in cls.__mro__:
        left_out |= {name for name, x in vars(parent).items() if isinstance(x, functools.cached_property)}
    return {name: x for name, x in sorted(found.items()) if name not in left_out}
