"""Flags that one choice of a command takes, such as an engine or a method: a settings dataclass a choice."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.values import hints_of


def with_flags_of(*settings: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has a command take the fields of dataclasses as parameters; its `**given` has those that are given.

    Args:
      *settings: the dataclasses; their `Attributes:` end the command's documentation. The first one that has
        a field documents it.
    """
    fields: dict[str, dataclasses.Field] = {}
    hints: dict[str, Any] = {}
    for cls in settings:
        for field in dataclasses.fields(cls):
            fields.setdefault(field.name, field)
            hints.setdefault(field.name, hints_of(cls)[field.name])

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        *own, _ = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def command(*args: Any, **given: Any) -> Any:
            return function(*args, **given)

        del command.__wrapped__  # whose parameters are others
        taken = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(field))
            for name, field in fields.items()
        ]
        known = typing.get_type_hints(function, include_extras=True)
        command.__signature__ = inspect.Signature([*own, *taken])
        command.__annotations__ = {p.name: known[p.name] for p in own} | {n: hints[n] for n in fields}
        command.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), *_documented(settings)])
        return command

    return decorate


def settings_of(choices: Mapping[str, type], chosen: str, given: Mapping[str, Any]) -> Any:
    """Returns the settings of a choice, made of the flags that were given.

    Args:
      choices: the settings dataclass of each choice, by what a user types for it.
      chosen: one of them.
      given: the flags by name.

    Raises:
      UserError: a flag is for other choices, or one that this choice needs is missing.
    """
    names = {choice: [f.name for f in dataclasses.fields(cls)] for choice, cls in choices.items()}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in names[chosen]:
            takers = " and ".join(choice for choice, own in names.items() if name in own)
            raise UserError(f"--{name} is for {takers}, not for {chosen}: leave it out")
    fields = dataclasses.fields(choices[chosen])
    needed = [f"--{f.name}" for f in fields if f.default is dataclasses.MISSING and f.name not in given]
    if needed:
        raise UserError(f"{chosen} needs {' and '.join(needed)}")
    return choices[chosen](**given)


def _default(field: dataclasses.Field) -> Any:
    """Returns the default of a flag; one that only some choices need may be missing."""
    return None if field.default is dataclasses.MISSING else field.default


def _documented(settings: tuple[type, ...]) -> list[str]:
    """Returns the lines of the `Attributes:` sections, of each name once."""
    lines, seen = [], set()
    for base in dict.fromkeys(itertools.chain.from_iterable(cls.__mro__[:-1] for cls in settings)):
        about, here = "", set()
        for line in inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].splitlines():
            about = match[1] if (match := re.match(r"  (\w+): ", line)) else about
            here.add(about)
            lines += [] if about in seen else [line]
        seen |= here
    return lines
