"""Flags of a command that come from settings dataclasses, such as one for each engine or method."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.values import hints_of


def with_flags_of(*settings: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds dataclass fields to a command's parameters; its `**given` gets those that a caller gives.

    If several dataclasses have a field, the first one documents it.
    """
    fields: dict[str, dataclasses.Field] = {}
    for cls in settings:
        for field in dataclasses.fields(cls):
            fields.setdefault(field.name, field)
    # Only some choices need a field without a default, so its flag may be missing.
    defaults = {name: None if f.default is dataclasses.MISSING else f.default for name, f in fields.items()}
    taken = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in defaults.items()
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        *own, _ = inspect.signature(function).parameters.values()

        def command(*args: Any, **given: Any) -> Any:
            return function(*args, **given)

        return with_parameters(command, function, own, taken, settings)

    return decorate


def with_parameters(
    command: Callable[..., Any],
    function: Callable[..., Any],
    own: Iterable[inspect.Parameter],
    taken: Iterable[inspect.Parameter],
    settings: Sequence[type],
) -> Callable[..., Any]:
    """Returns `command`, a wrapper of `function`, with the name and documentation of `function`.

    Its parameters are `own`, which the function has itself, then `taken`, which are fields of `settings`. A
    field's type and documentation come from the first dataclass that has the field.
    """
    own, taken = list(own), list(taken)
    functools.update_wrapper(command, function)
    del command.__wrapped__  # otherwise inspect shows the function's parameters
    known = typing.get_type_hints(function, include_extras=True)
    hints = {name: hint for cls in reversed(settings) for name, hint in hints_of(cls).items()}
    command.__signature__ = inspect.Signature([*own, *taken])
    command.__annotations__ = {p.name: known[p.name] for p in own} | {p.name: hints[p.name] for p in taken}
    lines = _documented(settings, {p.name for p in taken})
    command.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), *lines])
    return command


def settings_of(choices: Mapping[str, type], chosen: str, given: Mapping[str, Any]) -> Any:
    """Returns the settings of a choice, made of the flags that were given.

    Args:
      choices: the settings dataclass of each choice, by the flag that selects it ("--method=rrf").
      chosen: the key in `choices` that the user selected.
      given: values of flags by name; None means that the flag was not given.
    """
    names = {choice: [f.name for f in dataclasses.fields(cls)] for choice, cls in choices.items()}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in names[chosen]:
            takers = " and ".join(choice for choice, own in names.items() if name in own)
            raise UserError(f"--{name} only applies to {takers}, not to {chosen}: leave it out")
    fields = dataclasses.fields(choices[chosen])
    needed = [f"--{f.name}" for f in fields if f.default is dataclasses.MISSING and f.name not in given]
    if needed:
        raise UserError(f"{chosen} needs {' and '.join(needed)}")
    return choices[chosen](**given)


def _documented(settings: Sequence[type], names: Collection[str]) -> list[str]:
    """Returns the lines of the dataclasses' `Attributes:` sections that describe `names`, each name once."""
    lines, seen = [], set()
    for base in dict.fromkeys(itertools.chain.from_iterable(cls.__mro__[:-1] for cls in settings)):
        about, here = "", set()
        for line in inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].splitlines():
            about = match[1] if (match := re.match(r"  (\w+): ", line)) else about
            here.add(about)
            lines += [line] if about in names and about not in seen else []
        seen |= here
    return lines
