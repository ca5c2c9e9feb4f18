"""Checks values of simple types against type hints, and describes type hints in words.

`Annotated[int, Within(1)]`, called `Count` here, is a whole number of at least 1. Such hints check flags
(`cli`), gin files (`gin_config`), dataclasses made in Python (`checked`) and JSON files (`json_files`).
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from jaxir.core.errors import BadValueError


@dataclasses.dataclass(frozen=True)
class Within:
    """Metadata of a hint: numbers from `low` to `high`; `without` names the ends that are excluded."""

    low: float = -math.inf
    high: float = math.inf
    without: Literal["low", "high", "both"] | None = None

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.without in ("low", "both") else value >= self.low
        return above and (value < self.high if self.without in ("high", "both") else value <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low}" if self.without == "low" else f"of at least {self.low}"
        if self.without is None:
            return f"from {self.low} to {self.high}"
        low = f"of at least {self.low}" if self.without == "high" else f"above {self.low}"
        return f"{low} and {'at most' if self.without == 'low' else 'below'} {self.high}"


class _Object:
    """Metadata of a hint: any object except text, numbers, lists and dicts; its class is not imported."""

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, Deferred) and issubclass(value.kind, type):
            return False  # the value is a class, but must be an instance
        return type(value) not in _PLAIN

    def __str__(self) -> str:
        return "an object, @NAME() in gin files"


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A placeholder for an object that gin will make later; only its class is known.

    Attributes:
      name: the object's name, as the user wrote it in the gin file.
      kind: the object's class.
    """

    name: str
    kind: type

    def fits(self, kind: Any) -> bool:
        """Returns whether the object may be of this kind; True if the kind is neither class nor function."""
        if kind is collections.abc.Callable:
            return any("__call__" in vars(base) for base in self.kind.__mro__)
        return kind is not Literal and (not _is_class(kind) or issubclass(self.kind, kind))

    def __repr__(self) -> str:
        return self.name


# All numbers below must also be finite.
Count = Annotated[int, Within(1)]
Layers = Annotated[int, Within(1, 1000)]  # limited, because layers are created one by one, which takes long
Size = Annotated[int, Within(1, 2**31 - 1)]  # size of an axis of parameters; XLA uses int32 for sizes
Buckets = Annotated[int, Within(1, 2**16)]  # buckets of distances; their bounds are computed one by one
Natural = Annotated[int, Within(0)]
MOST_STEPS = 2**31 - 1  # devices count training steps in an int32
Steps = Annotated[int, Within(1, MOST_STEPS)]
BatchSize = Annotated[int, Within(1, 2**24)]  # pairs per step; kernels index rows x heads by int32
Seed = Annotated[int, Within(0, 2**32 - 1)]
Positive = Annotated[float, Within(0, without="low")]
PositiveNumber = Annotated[int | float, Within(0, without="low")]
Temperature = Annotated[float, Within(1e-6)]  # logits divided by a smaller number may overflow float32
Interval = Annotated[
    int | float, Within(0, MOST_STEPS, without="low")
]  # a number of steps; below 1, a share of all steps
Warmup = Annotated[
    int | float, Within(0, MOST_STEPS)
]  # a number or share of steps, like `Interval`; 0: no warm-up
NotNegative = Annotated[float, Within(0)]
NotNegativeNumber = Annotated[int | float, Within(0)]
Share = Annotated[float, Within(0, 1)]
Rate = Annotated[float, Within(0, 1, without="high")]
Portion = Annotated[float, Within(0, 1, without="both")]
Object = Annotated[Any, _Object()]

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "None"}
# Types whose values gin writes without @.
_PLAIN = {str, int, float, bool, list, tuple, dict, types.NoneType}
_MOST = 2**63 - 1  # no count, size or device number has more than 64 bits
_LISTS = (list, tuple, collections.abc.Sequence)
_DICTS = (dict, collections.abc.Mapping)
_UNIONS = (typing.Union, types.UnionType)
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@functools.cache
def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the type hints of a function's or class's parameters; {} if they cannot be resolved."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        # The generated __init__ of a dataclass has hints that only the modules of its bases can resolve.
        generated = getattr(vars(function).get("__dataclass_params__"), "init", False)
        if inspect.isclass(function) and "__init__" in vars(function) and not generated:
            hints |= typing.get_type_hints(function.__init__, include_extras=True)
        return hints
    except (NameError, TypeError, AttributeError):  # names that are imported for type checkers only
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a parameter may have this value; True if the hint is not of a simple type.

    `inspect.Parameter.empty`, an unknown value, fits any hint. For a `Deferred`, its class must fit.
    """
    if value is inspect.Parameter.empty:
        return True
    kind, arms = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Annotated:
        return fits(value, arms[0]) and all(value in m for m in arms[1:] if isinstance(m, Within | _Object))
    if kind in _UNIONS:
        return any(fits(value, arm) for arm in arms)
    if isinstance(value, Deferred):
        return value.fits(kind)
    if kind is Literal:
        return any(value == arm and type(value) is type(arm) for arm in arms)
    if kind in (int, float):
        if isinstance(value, bool):
            return False
        if isinstance(value, numbers.Integral):
            return -_MOST - 1 <= value <= _MOST
        return kind is float and isinstance(value, numbers.Real) and math.isfinite(value)
    if kind in _LISTS:
        each = Any if not arms or (kind is tuple and arms[-1] is not ...) else arms[0]
        listed = isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes)
        if each in WORDS and each not in (int, float):  # check each type once, for lists of millions of texts
            return listed and all(issubclass(part, each) for part in set(map(type, value)))
        return listed and all(fits(part, each) for part in value)
    if kind in _DICTS:
        key, each = arms or (Any, Any)
        dicts = isinstance(value, collections.abc.Mapping)
        return dicts and all(fits(k, key) and fits(v, each) for k, v in value.items())
    if kind is collections.abc.Callable:
        return callable(value)
    return not (kind in WORDS or _is_class(kind) or _is_runtime_protocol(kind)) or isinstance(value, kind)


def _is_class(kind: Any) -> bool:
    """Whether a hint is a class but not a protocol."""
    return kind is not Any and inspect.isclass(kind) and not getattr(kind, "_is_protocol", False)


def _is_runtime_protocol(kind: Any) -> bool:
    return getattr(kind, "_is_runtime_protocol", False)


def in_words(hint: Any) -> str:
    """Returns a type hint in words."""
    kind, arms = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint == Object:
        return str(arms[1])
    if kind is Annotated:
        return " ".join([in_words(arms[0]), *(str(m) for m in arms[1:] if isinstance(m, Within))])
    if kind in _UNIONS:
        return " or ".join(in_words(arm) for arm in arms if not (arm is int and float in arms))
    if kind is Literal:
        return " or ".join(map(repr, arms))
    if kind in _LISTS:
        return f"a list, each {in_words(arms[0])}" if arms and arms[0] is not Any else "a list"
    if kind in _DICTS:
        return "a dict"
    if kind is collections.abc.Callable:
        return "a function, @NAME in gin files"
    named = _is_class(kind) or _is_runtime_protocol(kind)
    return WORDS.get(kind) or (f"an object, {kind.__name__}" if named else "something else")


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raises a BadValueError if a value, which the user calls `name`, does not fit its hint."""
    if not fits(value, hint):
        raise BadValueError(f"{name} must be {in_words(hint)}, not {value!r:.80}")


def check_not_empty(name: str, value: Any) -> None:
    """Refuses a text, or a list with a text, that is only white space: a path "" would mean "."."""
    texts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(text, str) and not text.strip() for text in texts):
        raise BadValueError(f"{name} is empty")


def checked(cls: type) -> type:
    """Makes a dataclass check its fields before its `__post_init__`; apply `@checked` below `@dataclass`."""
    own = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        hints = hints_of(type(self))
        for field in dataclasses.fields(self):
            check_value(field.name, getattr(self, field.name), hints.get(field.name, Any))
        if own is not None:
            own(self)

    cls.__post_init__ = __post_init__
    return cls


def parse(text: str, hint: Any) -> Any:
    """Returns the value of a flag's text. A BadValueError does not name the flag; the caller adds it."""
    kind = simple(hint)
    try:
        if kind is bool:
            value = _TRUTH[text.lower()]
        elif kind in (int, float, number):
            # Refuse 1_0 and non-ASCII digits, which Python accepts.
            value = kind(text) if re.fullmatch(r"[\w.+-]+", text, re.ASCII) and "_" not in text else text
        elif kind == list[str]:
            value = [part for part in text.split(",") if part] or [""]
        else:
            value = text
    except (ValueError, KeyError):
        value = text
    if not fits(value, hint):
        raise BadValueError(f"must be {in_words(_without_none(hint))}, not {value!r:.80}")
    return value


def number(text: str) -> int | float:
    """Returns a whole number as an int, any other as a float; --help shows this function's name."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def simple(hint: Any) -> Any | None:
    """Returns the type to which a flag's text is parsed; None if only gin or Python can give such a value."""
    kind, arms = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Annotated:
        return simple(arms[0])
    if kind in _UNIONS:
        arms = [arm for arm in arms if arm is not type(None)]
        found = [s for s in map(simple, arms) if s is not None]
        if set(found) == {int, float}:
            return number
        return found[0] if len(found) == len(arms) else None
    if kind in (str, int, float, bool) or kind is Literal:
        return hint
    if kind not in _LISTS or not arms:
        return None
    texts = typing.get_origin(arms[0]) is Literal or str in (arms[0], *typing.get_args(arms[0]))
    return list[str] if texts else None


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in _UNIONS:
        return hint
    return typing.Union[tuple(arm for arm in typing.get_args(hint) if arm is not type(None))]  # noqa: UP007
