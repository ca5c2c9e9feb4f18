"""gin at the edge: files and bindings in, one bound call out. The core never imports gin.

gin files use dynamic registration (`from __gin__ import dynamic_registration`, then plain imports), so any
function or class of the project, or of a user's own module, is configurable without being registered.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import pprint
import re
import tokenize
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import gin
from gin import config as gin_internals

from jaxir.cli.gin_checks import check_macros, check_made, check_read, check_set, check_values
from jaxir.cli.gin_errors import explain
from jaxir.cli.gin_files import check_includes, check_nesting, with_moved_imports
from jaxir.cli.gin_keys import (
    MACRO,
    UNKNOWN,
    Key,
    chain_of,
    is_required,
    macro_of,
    parameter_of,
    read_by,
    referred_macros,
)
from jaxir.core.errors import UserError
from jaxir.core.installation import RECIPES

DEFAULT = "default/"  # before a macro's name in a piece
PLACES = ("output_dir",)  # where a run lies is no part of what it is
PARSE_ERRORS = (
    *(ValueError, OSError, SyntaxError, ImportError, AttributeError, NameError, TypeError, KeyError),
    tokenize.TokenError,
    RecursionError,
)


def _reraise(error: BaseException, message: str) -> NoReturn:
    """Lets an error that comes out of a bound function be what it is; gin would raise a copy that says less.

    The copy has the message with the call stack of gin's after it, but no errno, no path and no cause.
    """
    if "In call to configurable" in message:
        raise error
    _gins_reraise(error, message)


_gins_reraise = gin_internals.utils.augment_exception_message_and_reraise
gin_internals.utils.augment_exception_message_and_reraise = _reraise


class _InOrder:
    """Writes dicts of a configuration as they are; gin sorts them, and parts of a sum draw in their order."""

    pformat = staticmethod(functools.partial(pprint.pformat, sort_dicts=False))


gin_internals.pprint = _InOrder


def bind(
    function: Callable[..., Any],
    files: Sequence[str],
    bindings: Sequence[str],
    flags: dict[str, Any],
    *,
    only: Collection[str] | None = None,
) -> tuple[Callable[..., Any], set[str]]:
    """Parses gin files, then `NAME=VALUE` bindings, then flags; returns the bound function and what is set.

    What is typed overrides what files say. A flag whose parameter a file binds to a macro sets the macro, so
    that what else hangs on it follows: with `train.steps = %STEPS` in a file `--steps=30` is
    `--gin.STEPS=30`. Where two flags hang on one macro, the one of its name sets it, the other its parameter
    alone. Flags become bindings, but for those of `PLACES`, so that `operative_config` repeats the run.

    A bare word as a value (`--gin.MODEL=st:all-MiniLM-L6-v2`) is a string; gin itself wants quotes round it.
    A piece offers a value with `default/NAME = VALUE`: NAME has it where no file, binding or flag sets NAME.

    Args:
      function: the command's entry point; `one_of` is what `cli.one_of` has noted.
      files: gin files, later ones override earlier ones.
      bindings: `NAME=VALUE`, applied after them; NAME is a macro or `function.parameter`.
      flags: the flags that were given.
      only: the parameters that will be read, where not all are: what others hang on need not be set.

    Raises:
      UserError: a file that does not exist, a misspelt binding or macro (with the name that was meant), one
        that is typed and that nothing reads, a required value left open, a value of the wrong type, or one
        thing set both by a flag and by a binding.
    """
    try:
        return _bind(function, files, bindings, flags, only)
    except RecursionError as error:
        raise UserError(
            "gin: macros or included files refer to too many others, one after the other"
        ) from error


def _bind(
    function: Callable[..., Any],
    files: Sequence[str],
    bindings: Sequence[str],
    flags: dict[str, Any],
    only: Collection[str] | None,
) -> tuple[Callable[..., Any], set[str]]:
    """Does what `bind` says."""
    defaults = _parse(files, function, bindings)
    typed = [_key_of(binding) for binding in bindings]
    used_by_files = set(referred_macros())
    _set_flags(function, flags, typed)
    _give_way(function, flags, typed)
    if only is not None:
        _fill_unread([parameter_of(function, name) for name in only])
    check_macros({key.scope for key in typed if key.selector == MACRO}, used_by_files, defaults)
    read = read_by(parameter_of(function, "").selector)
    check_set(read if only is None else None)
    check_made("", parameter_of(function, "").selector, ())
    check_read(read, typed)
    if only is not None:
        parameters = gin_internals._CONFIG.get(parameter_of(function, "")[:2], {})
        for name in set(parameters) - set(only):
            del parameters[name]
    check_values(parameter_of(function, "").selector)
    bound = set(gin.get_bindings(function, resolve_references=False))
    gin.finalize()
    return gin.get_configurable(function), bound | flags.keys()


def arguments(
    function: Callable[..., Any],
    files: Sequence[str],
    bindings: Sequence[str],
    flags: Mapping[str, Any],
    only: Collection[str],
) -> dict[str, Any]:
    """Returns what `bind` would give to some parameters of a function; nothing else need be set.

    Args:
      function: whose parameters files and bindings speak of.
      files: as for `bind`.
      bindings: as for `bind`.
      flags: those that are given; of others than `function`'s parameters it makes nothing.
      only: which parameters.

    Raises:
      UserError: as `bind`.
    """
    own = inspect.signature(function).parameters
    bind(function, files, bindings, {n: value for n, value in flags.items() if n in own}, only=only)
    return gin.get_bindings(function)


def operative_config() -> str | None:
    """Returns the bindings that the run has used, as a gin file; None where no gin was given."""
    return gin.config_str() if gin_internals.config_is_locked() else None


def _quote(binding: str) -> str:
    name, value = (part.strip() for part in binding.partition("=")[::2])
    try:
        ast.literal_eval(value)
        return binding
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        bare = not re.search(r"^[@%]|[\[\](){}'\"]", value)
        return f"{name}={value!r}" if bare else binding


def _parse(files: Sequence[str], function: Callable[..., Any], bindings: Sequence[str]) -> set[str]:
    """Makes the configuration of files and bindings; returns the macros that have but their default."""
    gin.clear_config()
    for file in files:
        check_includes(Path(file))
    for binding in bindings:
        check_nesting(f"--gin.{binding.partition('=')[0]}", binding)
    gin.add_config_file_search_path(str(RECIPES))
    gin.external_configurable(function, module=function.__module__)
    logging.disable(logging.ERROR)  # gin logs a missing file besides raising
    try:
        for file in files:
            text = with_moved_imports(file)
            gin.parse_config_file(file) if text is None else gin.parse_config(text)
        gin.parse_config([_quote(b) for b in bindings])
    except PARSE_ERRORS as error:
        raise UserError(explain(error, files)) from error
    finally:
        logging.disable(logging.NOTSET)
    config, defaults = gin_internals._CONFIG, set()
    for scope, selector in list(config):
        if selector == MACRO and scope.startswith(DEFAULT):
            default, name = config.pop((scope, selector)), scope.removeprefix(DEFAULT)
            if (name, selector) not in config:
                config[name, selector] = default
                defaults.add(name)
    return defaults


def _key_of(binding: str) -> Key:
    name = binding.partition("=")[0].strip()
    if "." not in name:
        return Key.of_macro(name)
    parsed = gin_internals.ParsedBindingKey.parse(name)
    return Key(parsed.scope, parsed.complete_selector, parsed.arg_name)


def _set_flags(function: Callable[..., Any], flags: dict[str, Any], typed: Sequence[Key]) -> None:
    chains = {flag: chain_of(parameter_of(function, flag)) for flag in flags}
    for flag, chain in chains.items():
        for key in chain:
            if key in typed:
                raise UserError(f"{flag} is given twice, by --{flag} and by --gin.{key}; keep one of them")
    macros = [chain[1].scope for chain in chains.values() if len(chain) > 1]
    for flag, value in flags.items():
        own, *linked = chains[flag]
        shared = linked and macros.count(linked[0].scope) > 1 and linked[0].scope.lower() != flag
        if linked and not shared:
            gin.bind_parameter(linked[0], value)
        elif flag not in PLACES or own.value is not None:
            gin.bind_parameter(own, value)
    alternatives = getattr(function, "one_of", ())
    given = {n for n in alternatives if n in flags or set(chain_of(parameter_of(function, n))) & set(typed)}
    for name in set(alternatives) - given if given else ():
        own, *linked = chain_of(parameter_of(function, name))
        alone = linked and referred_macros().count(linked[0].scope) == 1
        if own.value is not None:
            gin.bind_parameter(linked[0] if alone else own, None)


def _give_way(function: Callable[..., Any], flags: Mapping[str, Any], typed: Sequence[Key]) -> None:
    """Sets aside what gin files say of a parameter that would limit what is typed; see `cli.gives_way`."""

    def is_typed(name: str) -> bool:
        return name in flags or bool(set(chain_of(parameter_of(function, name))) & set(typed))

    for name, other in getattr(function, "gives_way", {}).items():
        if not is_typed(name) and is_typed(other):
            default = inspect.signature(function).parameters[name].default
            gin.bind_parameter(parameter_of(function, name), default)
        for instead in set(getattr(function, "one_of", ())) - {other}:
            if is_typed(name) and is_typed(instead):
                raise UserError(f"{name} counts with {other} only, and {instead} is given: leave {name} out")


def _fill_unread(read: Sequence[Key]) -> None:
    """Sets macros that are required, but that nothing which will be read hangs on."""
    config, needed, values = gin_internals._CONFIG, set(), [key.value for key in read]
    while values:
        for reference in gin_internals.iterate_references(values.pop()):
            macro = macro_of(reference)
            found = [Key.of_macro(macro)[:2]] if macro else []
            found += [key for key in config if not macro and key[1] == reference.configurable.selector]
            values += [value for key in found if key not in needed for value in config.get(key, {}).values()]
            needed.update(found)
    for key, parameters in config.items():
        for name, value in parameters.items():
            if key not in needed and key[1] == MACRO and is_required(value):
                parameters[name] = UNKNOWN
