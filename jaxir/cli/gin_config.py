"""Turns gin files, bindings and flags into one bound call. In jaxir, only `jaxir.cli` imports gin.

gin files use dynamic registration: `from __gin__ import dynamic_registration`, then plain imports. So any
function or class of jaxir or of a user's own module can be bound.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from jaxir.cli import short_names
from jaxir.cli.gin_bindings import REQUIRED, Bindings, Key, given_twice
from jaxir.cli.gin_files import Reader
from jaxir.core.choices import rules_of
from jaxir.core.errors import UserError, suggest
from jaxir.core.values import check_not_empty, check_value

PLACES = ("output_dir",)  # the directory of a run, which is not part of its settings
_text: list[str] = []  # the gin text of the last `bind`


def bind(
    function: Callable[..., Any],
    files: Sequence[str],
    bindings: Sequence[str],
    flags: dict[str, Any],
    *,
    command: Callable[..., Any] | None = None,
) -> tuple[Callable[[], Any], set[str]]:
    """Reads gin files, then bindings, then flags; returns the bound call and the parameters that are set.

    Later values override earlier ones. If a file binds a flag's parameter to a macro, the flag sets the
    macro, and so every parameter that is bound to the macro. If two flags share a macro, only the flag with
    the macro's name sets it. Flags become bindings, so that `operative_config` repeats the run.

    Args:
      function: the function whose parameters are bound.
      files: gin files.
      bindings: `NAME=VALUE` or `--name=VALUE`; NAME is a short name (`short_names`), a macro or
        `function.parameter`.
      flags: the flags that were given.
      command: the function to call with the values of the parameters that both have; `function` by default.
    """
    command = command or function
    own, taken = inspect.signature(function).parameters, inspect.signature(command).parameters
    set_by_flags = {name: value for name, value in flags.items() if name in own}
    found = Bindings(function)
    reader = Reader(found)
    reader.files(files)
    short_names.check_have_values(found, [b for b in bindings if b.startswith("--")])
    reader.typed(bindings)
    short_names.apply(found)
    _set_flags(found, function, set_by_flags)
    _give_way(found, function, set_by_flags)
    _check_read(found)
    for key in found.innermost("", found.command).values():
        if key.parameter not in taken:
            del found.values[key]
    _check_set(found)
    _check_values(found)
    bound = {key.parameter for key in found.innermost("", found.command).values()}
    gin.clear_config()
    gin.external_configurable(function, module=function.__module__)
    _text[:] = [found.text()]
    gin.parse_config(_text[0])
    gin.finalize()

    def call() -> Any:
        return command(**{**gin.get_bindings(function), **flags})

    return call, bound | flags.keys()


def operative_config() -> str | None:
    """Returns the bindings that the run uses as a gin file's text; None if no gin was given."""
    return _text[0] if _text and gin.config_is_locked() else None


def settled(command: str, text: str) -> dict[str, str]:
    """Returns the non-default settings that a gin text gives a command ("package.module:function").

    Two texts that describe the same run give equal results.
    """
    module, _, function = command.partition(":")
    found = Bindings(getattr(importlib.import_module(module), function))
    Reader(found).text(text)
    short_names.apply(found)
    return {str(key): repr(value) for key, _, value in found.settings()}


def _set_flags(found: Bindings, function: Callable[..., Any], flags: Mapping[str, Any]) -> None:
    chains = {flag: found.chain(found.of_command(flag)) for flag in flags}
    for flag, chain in chains.items():
        for key in chain:
            if key in found.typed:
                raise given_twice(flag, f"--{flag}", found.typed[key])
    linked = [chain[1].scope for chain in chains.values() if len(chain) > 1]
    for flag, value in flags.items():
        own, *macros = chains[flag]
        if macros and (linked.count(macros[0].scope) == 1 or macros[0].scope.lower() == flag):
            found.values[macros[0]] = value
        elif flag not in PLACES or own in found.values:
            found.values[own] = value
    alternatives = rules_of(function).one_of
    given = [name for name in alternatives if _is_typed(found, name, flags)]
    for name in set(alternatives) - set(given) if given else ():
        own = found.of_command(name)
        if found.values.get(own) is not None:
            found.values[own] = None


def _is_typed(found: Bindings, name: str, flags: Mapping[str, Any]) -> bool:
    return name in flags or any(key in found.typed for key in found.chain(found.of_command(name)))


def _give_way(found: Bindings, function: Callable[..., Any], flags: Mapping[str, Any]) -> None:
    """Resets parameters whose value from a gin file would limit a given flag; see `choices.Rules`."""
    rules = rules_of(function)
    for name, other in rules.gives_way.items():
        if not _is_typed(found, name, flags) and _is_typed(found, other, flags):
            found.values[found.of_command(name)] = inspect.signature(function).parameters[name].default
        for instead in set(rules.one_of) - {other}:
            if _is_typed(found, name, flags) and _is_typed(found, instead, flags):
                raise UserError(f"{name} only applies with {other}, not with {instead}: leave {name} out")


def _check_read(bindings: Bindings) -> None:
    """Raises a UserError if the command line sets a parameter or macro that the command does not read."""
    read = bindings.read()
    macros = bindings.macros_behind(read)
    for key in bindings.typed:
        if key in read or (key.is_macro and key.scope in macros):
            continue
        what, others = "it reads", [k for k in read if k.parameter == key.parameter]
        if key.is_macro:
            what, others = "it belongs to", short_names.holders(bindings, key)
        more = f"; {what} {', '.join(sorted(map(str, others)))}" if others else ""
        raise UserError(f"{key} is set but nothing reads it: this command makes no such object{more}")


def _check_set(bindings: Bindings) -> None:
    """Raises a UserError if a macro or a required parameter that the command reads has no value."""
    read = bindings.read()
    macros = [Key.of_macro(name) for name in sorted(bindings.macros_behind(read))]
    defined = {key.scope for key in bindings.values if key.is_macro}
    for key in [*macros, *read]:
        if key not in bindings.values and "." not in key.scope:
            raise UserError(f"macro {key} is used but never set{suggest(str(key), defined)}")
        if bindings.values.get(key) == REQUIRED:
            raise UserError(f"{key} must be set: --{short_names.short_name(key)}=...")


def _check_values(bindings: Bindings) -> None:
    """Refuses values that do not fit their parameters, and empty texts for the command's own parameters."""
    for key, last, value in bindings.settings():
        called = bindings.typed.get(last, str(last)).removeprefix("--gin.")
        check_value(called, value, bindings.hint(key))
        if key.selector == bindings.command:
            check_not_empty(called, value)
