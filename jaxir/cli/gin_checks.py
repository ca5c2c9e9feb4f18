"""What of a parsed gin configuration is refused before anything is made of it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gin import config as gin_internals

from jaxir.cli.gin_files import shipped_macros
from jaxir.cli.gin_keys import (
    MACRO,
    Key,
    bound_in,
    chain_of,
    is_imported,
    is_required,
    macro_of,
    macros_behind,
    parameters_bound,
    reached_by,
    references_of,
    referred_macros,
    resolved,
    scope_of,
)
from jaxir.core.errors import UserError, suggest
from jaxir.core.values import check_not_empty, check_value, hints_of

MISSPELT = 0.8  # so like another name that it was meant to be that one


def check_macros(typed: Collection[str], used_by_files: Collection[str], defaults: Collection[str]) -> None:
    """Refuses macros that are misspelt, unset, or typed in vain; warns of others in vain, and forgets them.

    Pieces of a recipe may offer more than others use, but what is typed is meant to change something.
    """
    config = gin_internals._CONFIG
    defined = {scope for scope, selector in config if selector == MACRO}
    used = set(referred_macros())
    for name in sorted(defined):
        _check_ends(name, ())
    for name in sorted(used - defined):
        raise UserError(f"macro {name} is used but never set{suggest(name, defined - used)}")
    unused = sorted(defined - used)
    shipped = shipped_macros() if unused else set()
    for name in unused:
        what = f"macro {name} is set but nothing uses it"
        if name in typed:
            there_are = f" (there are {', '.join(sorted(used))})" if used else ""
            raise UserError(what + (suggest(name, used) or there_are))
        if name not in used_by_files and name not in defaults:
            if name not in shipped and (meant := suggest(name, used | shipped, likeness=MISSPELT)):
                raise UserError(what + meant)
            print(f"warning: {what}{suggest(name, used)}", file=sys.stderr)
        del config[name, MACRO]


def check_set(read: set[Key] | None) -> None:
    """Refuses required values that are left open; of what is not read it forgets those, and what has them.

    Args:
      read: what is read; None: all is.
    """
    config = gin_internals._CONFIG
    keys = [Key(*key, name) for key, parameters in config.items() for name in parameters]
    left_open = [key for key in keys if is_required(key.value)]
    macros = None if read is None else macros_behind(read)
    for key in left_open:
        if read is None or key in read or (key.selector == MACRO and key.scope in macros):
            raise UserError(f"{key} must be set: {key.flags[0]}=...")
    if not left_open:
        return
    unset = {key.scope for key in left_open if key.selector == MACRO}
    for key in [key for key in keys if key in left_open or macros_behind([key]) & unset]:
        del config[key[:2]][key.parameter]
        if not config[key[:2]]:
            del config[key[:2]]


def check_made(scope: str, selector: str, within: tuple[tuple[str, str], ...]) -> None:
    """Raises a UserError where an object is made of itself, be it by way of others."""
    if (scope, selector) in within:
        circle = [*within[within.index((scope, selector)) :], (scope, selector)]
        way = " -> ".join(name.rpartition(".")[2] for _, name in circle)
        raise UserError(f"{way.rpartition(' ')[2]} would be made of itself ({way})")
    for reference in references_of(bound_in(scope, selector)):
        if reference.evaluate:
            own = scope_of(reference) or scope
            check_made(own, reference.configurable.selector, (*within, (scope, selector)))


def check_read(read: set[Key], typed: Sequence[Key]) -> None:
    """Refuses parameters and macros that are typed of something that the command does not make."""
    macros = macros_behind(read)
    for key in typed:
        if key.scope in macros if key.selector == MACRO else key in read or not is_imported(key):
            continue
        if key.selector == MACRO:
            there_are = [other for other in parameters_bound() if key.scope in macros_behind([other])]
            more = "; it is of {}"
        else:
            there_are = [other for other in read if other.parameter == key.parameter]
            more = "; there are {}"
        names = ", ".join(sorted("/".join(filter(None, (k.scope, str(k)))) for k in there_are))
        raise UserError(
            f"{key} is set but nothing reads it: this command makes no such object"
            + (more.format(names) if names else "")
        )


def check_values(command: str) -> None:
    """Refuses values that a parameter cannot have, and empty texts of the command, by the name it goes by."""
    reached = reached_by(command)
    for (scope, selector), parameters in gin_internals._CONFIG.items():
        configurable = gin_internals._REGISTRY.get_match(selector)
        if selector.startswith("gin.") or configurable is None:
            continue
        hints, defaults = hints_of(configurable.wrapped), _defaults_of(configurable.wrapped)
        for parameter in parameters:
            if (key := Key(scope, selector, parameter)) not in reached:
                continue
            *_, last = chain_of(key)
            value = resolved(last.value)
            if parameter in defaults and value is defaults[parameter]:
                continue
            check_value(str(last), value, hints.get(parameter, Any))
            if selector == command:
                check_not_empty(str(last), value)


def _check_ends(name: str, within: tuple[str, ...]) -> None:
    """Raises a UserError where a macro refers to itself, be it by way of others."""
    if name in within:
        way = " -> ".join([*within[within.index(name) :], name])
        raise UserError(f"macro {name} refers to itself ({way}) and so has no value")
    for reference in gin_internals.iterate_references(Key.of_macro(name).value):
        if other := macro_of(reference):
            _check_ends(other, (*within, name))


def _defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}
