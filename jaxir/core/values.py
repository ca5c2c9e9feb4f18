"""Values of simple types, as flags, gin files and JSON give them: what a type hint allows, and it in words.

A hint says what makes sense: `Annotated[int, Within(1)]`, which is called `Count` here, is a whole number of
at least 1. So one mechanism checks flags (`cli`), gin files (`gin_config`), what is made in Python
(`checked`) and what JSON files hold (`json_files`).
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
    """The numbers from `low` to `high`, for the metadata of a hint; `without` says which end is left out."""

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
    """What is no text, number or list, for the metadata of a hint whose class would be heavy to import."""

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, Later) and issubclass(value.kind, type):
            return False  # a class, where its object is meant
        return type(value) not in _PLAIN

    def __str__(self) -> str:
        return "an object, @NAME() in gin files"


@dataclasses.dataclass(frozen=True)
class Later:
    """What will be a value, where no more is known of it than its class.

    Attributes:
      name: what the user calls it.
      kind: its class.
    """

    name: str
    kind: type

    def fits(self, kind: Any) -> bool:
        """Returns whether it may be of this kind; True where that tells nothing of classes."""
        if kind is collections.abc.Callable:
            return any("__call__" in vars(base) for base in self.kind.__mro__)
        return kind is not Literal and (not _is_class(kind) or issubclass(self.kind, kind))

    def __repr__(self) -> str:
        return self.name


# All numbers must be finite besides.
Count = Annotated[int, Within(1)]
Layers = Annotated[int, Within(1, 1000)]  # which are made one by one
Size = Annotated[int, Within(1, 2**31 - 1)]  # of an axis of parameters, which XLA counts by an int32
Buckets = Annotated[int, Within(1, 2**16)]  # of distances, whose bounds are computed one by one
Natural = Annotated[int, Within(0)]
MOST_STEPS = 2**31 - 1  # steps are counted by an int32 on the devices
Steps = Annotated[int, Within(1, MOST_STEPS)]
BatchSize = Annotated[int, Within(1, 2**24)]  # pairs of a step; kernels number rows and heads by an int32
Seed = Annotated[int, Within(0, 2**32 - 1)]
Positive = Annotated[float, Within(0, without="low")]
PositiveNumber = Annotated[int | float, Within(0, without="low")]
Temperature = Annotated[float, Within(1e-6)]  # logits divided by less may be more than float32 holds
Interval = Annotated[int | float, Within(0, MOST_STEPS, without="low")]  # steps, or below 1 a share of all
Warmup = Annotated[int | float, Within(0, MOST_STEPS)]  # the same, or none
NotNegative = Annotated[float, Within(0)]
NotNegativeNumber = Annotated[int | float, Within(0)]
Share = Annotated[float, Within(0, 1)]
Rate = Annotated[float, Within(0, 1, without="high")]
Portion = Annotated[float, Within(0, 1, without="both")]
Object = Annotated[Any, _Object()]

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "None"}
_PLAIN = {str, int, float, bool, list, tuple, dict, types.NoneType}  # what gin files can write without @
_MOST = 2**63 - 1
_LISTS = (list, tuple, collections.abc.Sequence)
_DICTS = (dict, collections.abc.Mapping)


@functools.cache
def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the type hints of the parameters of a function or class; {} where they cannot be resolved."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        # `dataclass` writes one with the hints of inherited fields, as text that only their module can read.
        written = getattr(vars(function).get("__dataclass_params__"), "init", False)
        if inspect.isclass(function) and "__init__" in vars(function) and not written:
            hints |= typing.get_type_hints(function.__init__, include_extras=True)
        return hints
    except (NameError, TypeError, AttributeError):  # names that only type checkers import
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a parameter may have this value; True where the hint is of no simple type.

    True too where the value is not known yet, `inspect.Parameter.empty`, or all that is known is its class,
    `Later`, and that fits.
    """
    if value is inspect.Parameter.empty:
        return True
    kind, arms = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Annotated:
        return fits(value, arms[0]) and all(value in m for m in arms[1:] if isinstance(m, Within | _Object))
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, arm) for arm in arms)
    if isinstance(value, Later):
        return value.fits(kind)
    if kind is Literal:
        return any(value == arm and type(value) is type(arm) for arm in arms)
    if kind in (int, float):
        # No count, size or number of a device has more than 64 bits.
        if isinstance(value, bool):
            return False
        if isinstance(value, numbers.Integral):
            return -_MOST - 1 <= value <= _MOST
        return kind is float and isinstance(value, numbers.Real) and math.isfinite(value)
    if kind in _LISTS:
        each = Any if not arms or (kind is tuple and arms[-1] is not ...) else arms[0]
        listed = isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes)
        if each in WORDS and each not in (int, float):  # there may be millions, of few types
            return listed and all(issubclass(part, each) for part in set(map(type, value)))
        return listed and all(fits(part, each) for part in value)
    if kind in _DICTS:
        key, each = arms or (Any, Any)
        dicts = isinstance(value, collections.abc.Mapping)
        return dicts and all(fits(k, key) and fits(v, each) for k, v in value.items())
    if kind in WORDS:
        return isinstance(value, kind)
    if kind is collections.abc.Callable:
        return callable(value)
    return not (_is_class(kind) or _is_told_apart(kind)) or isinstance(value, kind)


def _is_class(kind: Any) -> bool:
    """Whether a hint is a class, and no protocol, which objects of any class may fulfil."""
    return kind is not Any and inspect.isclass(kind) and not getattr(kind, "_is_protocol", False)


def _is_told_apart(kind: Any) -> bool:
    """Whether a hint is a protocol of which it can be said whether an object fulfils it."""
    return getattr(kind, "_is_runtime_protocol", False)


def in_words(hint: Any) -> str:
    """Returns a type hint of simple types as a user would say it."""
    kind, arms = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint == Object:
        return str(arms[1])
    if kind is Annotated:
        return " ".join([in_words(arms[0]), *(str(m) for m in arms[1:] if isinstance(m, Within))])
    if kind in (typing.Union, types.UnionType):
        arms = [arm for arm in arms if not (arm is int and float in arms)]
        return " or ".join(map(in_words, arms))
    if kind is Literal:
        return " or ".join(map(repr, arms))
    if kind in _LISTS:
        return f"a list, each {in_words(arms[0])}" if arms and arms[0] is not Any else "a list"
    if kind in _DICTS:
        return "a dict"
    if kind is collections.abc.Callable:
        return "a function, @NAME in gin files"
    named = _is_class(kind) or _is_told_apart(kind)
    return WORDS.get(kind) or (f"an object, {kind.__name__}" if named else "something else")


def check_value(name: str, value: Any, hint: Any) -> None:
    """Checks a value by its hint.

    Args:
      name: what the user calls it.
      value: what it is.
      hint: what it may be.

    Raises:
      BadValueError: it does not fit.
    """
    if not fits(value, hint):
        raise BadValueError(f"{name} must be {in_words(hint)}, not {value!r:.80}")


def check_not_empty(name: str, value: Any) -> None:
    """Checks that a text, or each in a list, has more in it than white space: "" would be read as ".".

    Args:
      name: what the user calls it.
      value: of any type.

    Raises:
      BadValueError: it has not.
    """
    texts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(text, str) and not text.strip() for text in texts):
        raise BadValueError(f"{name} is empty")


def checked(cls: type) -> type:
    """Has a dataclass check its fields by their hints whenever one is made; goes below `@dataclass`.

    A field that does not fit costs a BadValueError. The class's `__post_init__`, its own or an inherited one,
    comes after.
    """
    own = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        hints = hints_of(type(self))
        for field in dataclasses.fields(self):
            check_value(field.name, getattr(self, field.name), hints.get(field.name, Any))
        if own is not None:
            own(self)

    cls.__post_init__ = __post_init__
    return cls


def check_idle(function: Callable[..., Any], of: str, **given: Any) -> None:
    """Checks that parameters which nothing will read have their defaults.

    Args:
      function: whose they are.
      of: what they are for.
      **given: their values.

    Raises:
      BadValueError: one was given, and would be passed over in silence.
    """
    parameters = inspect.signature(function).parameters
    for name, value in given.items():
        if value != parameters[name].default:
            raise BadValueError(f"--{name} is for {of}: leave it out")


def parse(text: str, hint: Any) -> Any:
    """Returns the value that a flag gives to a parameter.

    Args:
      text: what was typed.
      hint: a simple type: see `simple`.

    Raises:
      BadValueError: it is none. The sentence goes on after the parameter's name.
    """
    kind = simple(hint)
    try:
        if kind is bool:
            value = _TRUTH[text.lower()]
        elif kind in (int, float, number):
            # Python would read 1_0 and the digits of any script too, which are slips here.
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


_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def number(text: str) -> int | float:
    """Returns a whole number as an int, any other as a float; named as --help names it."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def simple(hint: Any) -> Any | None:
    """Returns the type a flag can hold, `None` for anything that only gin or Python can give."""
    kind, arms = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Annotated:
        return simple(arms[0])
    if kind in (typing.Union, types.UnionType):
        arms = [arm for arm in arms if arm is not type(None)]
        found = [s for s in map(simple, arms) if s is not None]
        if set(found) == {int, float}:
            return number
        return found[0] if len(found) == len(arms) else None
    if kind in (str, int, float, bool) or kind is Literal:
        return hint
    return list[str] if kind in _LISTS and arms and str in (arms[0], *typing.get_args(arms[0])) else None


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    return typing.Union[tuple(arm for arm in typing.get_args(hint) if arm is not type(None))]  # noqa: UP007
