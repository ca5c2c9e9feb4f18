"""Flags of a command: their rules, and flags from settings dataclasses, such as one for each method."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxir.core.errors import BadValueError, UserError
from jaxir.core.values import hints_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """How the command line sets a command's parameters; `@Rules(...)` marks the command.

    Attributes:
      one_of: alternative parameters: one that the command line gives overrides gin's values of the others.
      gives_way: parameters whose gin value must not limit another flag that the command line gives. With
        {"min_steps": "epochs"}, --epochs resets min_steps to its default, unless the command line gives
        --min_steps too.
      also_called: second spellings of flags: {"output_dir": "output"} makes --output set output_dir.
      hands_over: flags that call another command ("package.module:function") instead of the one that
        `@Rules` marks. The flag's value becomes that command's first parameter. Flags that both commands have
        are passed on.
      bound_as: the command ("package.module:function") whose parameters gin files bind for the command that
        `@Rules` marks.
      instead_of_gin: a flag that replaces gin files and required parameters.
    """

    one_of: Sequence[str] = ()
    gives_way: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also_called: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hands_over: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bound_as: str | None = None
    instead_of_gin: str | None = None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        function.rules = self
        return function


def rules_of(function: Callable[..., Any]) -> Rules:
    return getattr(function, "rules", Rules())


def with_flags_of(
    *settings: type, only: Collection[str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds dataclass fields to a command's parameters; its `**given` gets the fields that a caller sets.

    A required field stays required if all dataclasses have it. If several dataclasses have a field, the
    first one documents it. The command's `of_settings` has the names of the fields.

    Args:
      *settings: the dataclasses; their `Attributes:` become part of the command's documentation.
      only: names of the fields to take; None for all.
    """
    taken: dict[str, inspect.Parameter] = {}
    fields = [inspect.signature(cls).parameters for cls in settings]
    for name in dict.fromkeys(itertools.chain(*fields)):
        if only is None or name in only:
            found = [parameters.get(name) for parameters in fields]
            taken[name] = next(filter(None, found))
            if taken[name].default is inspect.Parameter.empty and None in found:
                taken[name] = taken[name].replace(default=None)
    hints = {name: hint for cls in reversed(settings) for name, hint in hints_of(cls).items()}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        *own, _ = inspect.signature(function).parameters.values()
        known = typing.get_type_hints(function, include_extras=True)
        function.of_settings = taken.keys()
        function.__signature__ = inspect.Signature([*own, *taken.values()])
        function.__annotations__ = {p.name: known[p.name] for p in own} | {n: hints[n] for n in taken}
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), *_documented(settings, taken)])
        return function

    return decorate


def settings_of(choices: Mapping[str, type], chosen: str, given: Mapping[str, Any]) -> Any:
    """Returns the settings object of a choice, such as a method, made of the flags that were given.

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


def check_idle(function: Callable[..., Any], purpose: str, **given: Any) -> None:
    """Raises a BadValueError if a parameter of `function` that will have no effect differs from its default.

    `purpose` ends the sentence "--name only applies to ...".
    """
    parameters = inspect.signature(function).parameters
    for name, value in given.items():
        if value != parameters[name].default:
            raise BadValueError(f"--{name} only applies to {purpose}: leave it out")


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
