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
import sys
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gin
from gin import config as gin_internals

from jaxir.errors import UserError, suggest
from jaxir.gin_errors import explain
from jaxir.gin_files import check_includes
from jaxir.installation import RECIPES
from jaxir.simple_types import Later, check_not_empty, check_value, hints_of

MACRO = "gin.macro"
DEFAULT = "default/"  # before a macro's name in a piece
MISSPELT = 0.8  # so like another name that it was meant to be that one
PLACES = ("output_dir",)  # where a run lies is no part of what it is
PARSE_ERRORS = (
    *(ValueError, OSError, SyntaxError, ImportError, AttributeError, NameError, TypeError, KeyError),
    tokenize.TokenError,
)
UNKNOWN = inspect.Parameter.empty  # a value that only a call gives


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


class _Key(NamedTuple):
    """A parameter of a configurable, or a macro: (NAME, "gin.macro", "value")."""

    scope: str
    selector: str
    parameter: str

    @classmethod
    def of_macro(cls, name: str) -> _Key:
        return cls(name, MACRO, "value")

    @property
    def value(self) -> Any:
        """What is bound to it; None where nothing is."""
        return gin_internals._CONFIG.get(self[:2], {}).get(self.parameter)

    def __str__(self) -> str:
        name = self.selector.rpartition(".")[2]
        return self.scope if self.selector == MACRO else f"{name}.{self.parameter}"


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
    defaults = _parse(files, function, bindings)
    typed = [_key_of(binding) for binding in bindings]
    used_by_files = set(_referred_macros())
    _set_flags(function, flags, typed)
    if only is not None:
        _fill_unread([_parameter(function, name) for name in only])
    _check_macros({key.scope for key in typed if key.selector == MACRO}, used_by_files, defaults)
    read = _read(_parameter(function, "").selector) if only is None else None
    _check_set(read)
    _check_made("", _parameter(function, "").selector, ())
    if only is not None:
        parameters = gin_internals._CONFIG.get(_parameter(function, "")[:2], {})
        for name in set(parameters) - set(only):
            del parameters[name]
    else:
        _check_read(read, typed)
    _check_values(_parameter(function, "").selector)
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
    except (ValueError, SyntaxError):
        bare = not re.search(r"^[@%]|[\[\](){}'\"]", value)
        return f"{name}={value!r}" if bare else binding


def _parse(files: Sequence[str], function: Callable[..., Any], bindings: Sequence[str]) -> set[str]:
    """Makes the configuration of files and bindings; returns the macros that have but their default."""
    gin.clear_config()
    for file in files:
        check_includes(Path(file))
    gin.add_config_file_search_path(str(RECIPES))
    gin.external_configurable(function, module=function.__module__)
    logging.disable(logging.ERROR)  # gin logs a missing file besides raising
    try:
        gin.parse_config_files_and_bindings(list(files), [_quote(b) for b in bindings], finalize_config=False)
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


def _key_of(binding: str) -> _Key:
    name = binding.partition("=")[0].strip()
    if "." not in name:
        return _Key.of_macro(name)
    parsed = gin_internals.ParsedBindingKey.parse(name)
    return _Key(parsed.scope, parsed.complete_selector, parsed.arg_name)


def _parameter(function: Callable[..., Any], name: str) -> _Key:
    return _Key("", f"{function.__module__}.{function.__name__}", name)


def _chain(key: _Key) -> list[_Key]:
    """Returns `key`, the macro that it is bound to, the macro that this one is bound to, and so on."""
    chain = [key]
    while (name := _macro_of(chain[-1].value)) and _Key.of_macro(name) not in chain:
        chain.append(_Key.of_macro(name))
    return chain


def _set_flags(function: Callable[..., Any], flags: dict[str, Any], typed: Sequence[_Key]) -> None:
    chains = {flag: _chain(_parameter(function, flag)) for flag in flags}
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
    given = {n for n in alternatives if n in flags or set(_chain(_parameter(function, n))) & set(typed)}
    for name in set(alternatives) - given if given else ():
        own, *linked = _chain(_parameter(function, name))
        alone = linked and _referred_macros().count(linked[0].scope) == 1
        if own.value is not None:
            gin.bind_parameter(linked[0] if alone else own, None)


def _fill_unread(read: Sequence[_Key]) -> None:
    """Sets macros that are required, but that nothing which will be read hangs on."""
    config, needed, values = gin_internals._CONFIG, set(), [key.value for key in read]
    while values:
        for reference in gin_internals.iterate_references(values.pop()):
            macro = _macro_of(reference)
            found = [_Key.of_macro(macro)[:2]] if macro else []
            found += [key for key in config if not macro and key[1] == reference.configurable.selector]
            values += [value for key in found if key not in needed for value in config.get(key, {}).values()]
            needed.update(found)
    for key, parameters in config.items():
        for name, value in parameters.items():
            if key not in needed and key[1] == MACRO and _is_required(value):
                parameters[name] = UNKNOWN


def _referred_macros() -> list[str]:
    """Returns the macro of each place where one is used."""
    references = gin_internals.iterate_references(gin_internals._CONFIG)
    return [name for reference in references if (name := _macro_of(reference))]


def _check_macros(typed: Collection[str], used_by_files: Collection[str], defaults: Collection[str]) -> None:
    """Refuses macros that are misspelt, unset, or typed in vain; warns of others in vain, and forgets them.

    Pieces of a recipe may offer more than others use, but what is typed is meant to change something.
    """
    config = gin_internals._CONFIG
    defined = {scope for scope, selector in config if selector == MACRO}
    used = set(_referred_macros())
    for name in sorted(defined):
        _check_ends(name, ())
    for name in sorted(used - defined):
        raise UserError(f"macro {name} is used but never set{suggest(name, defined - used)}")
    unused = sorted(defined - used)
    shipped = _shipped_macros() if unused else set()
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


def _check_set(read: set[_Key] | None) -> None:
    """Refuses required values that are left open; of what is not read it forgets those, and what has them.

    Args:
      read: what is read; None: all is.
    """
    config = gin_internals._CONFIG
    keys = [_Key(*key, name) for key, parameters in config.items() for name in parameters]
    left_open = [key for key in keys if _is_required(key.value)]
    macros = None if read is None else _macros_behind(read)
    for key in left_open:
        if read is None or key in read or (key.selector == MACRO and key.scope in macros):
            raise UserError(f"{key} must be set: --gin.{key}=...")
    unset = {key.scope for key in left_open if key.selector == MACRO}
    for key in [key for key in keys if key in left_open or _macros_behind([key]) & unset]:
        del config[key[:2]][key.parameter]
        if not config[key[:2]]:
            del config[key[:2]]


def _shipped_macros() -> set[str]:
    """Returns the macros that jaxir's own gin files know: none of them is a misspelling."""
    files = (RECIPES / "gin").rglob("*.gin")
    return {name for file in files for name in re.findall(r"^(?:default/)?(\w+) *=", file.read_text(), re.M)}


def _check_ends(name: str, within: tuple[str, ...]) -> None:
    """Raises a UserError where a macro refers to itself, be it by way of others."""
    if name in within:
        way = " -> ".join([*within[within.index(name) :], name])
        raise UserError(f"macro {name} refers to itself ({way}) and so has no value")
    for reference in gin_internals.iterate_references(_Key.of_macro(name).value):
        if other := _macro_of(reference):
            _check_ends(other, (*within, name))


def _check_made(scope: str, selector: str, within: tuple[tuple[str, str], ...]) -> None:
    """Raises a UserError where an object is made of itself, be it by way of others."""
    if (scope, selector) in within:
        circle = [*within[within.index((scope, selector)) :], (scope, selector)]
        way = " -> ".join(name.rpartition(".")[2] for _, name in circle)
        raise UserError(f"{way.rpartition(' ')[2]} would be made of itself ({way})")
    for reference in _references(_bound(scope, selector)):
        if reference.evaluate:
            own = _scope_of(reference) or scope
            _check_made(own, reference.configurable.selector, (*within, (scope, selector)))


def _bound(scope: str, selector: str) -> list[_Key]:
    """Returns the innermost binding within a scope of each parameter of a configurable."""
    parts, found = scope.split("/") if scope else [], {}
    for depth in range(len(parts) + 1):
        outer = "/".join(parts[:depth])
        for parameter in gin_internals._CONFIG.get((outer, selector), {}):
            found[parameter] = _Key(outer, selector, parameter)
    return list(found.values())


def _references(keys: Sequence[_Key]) -> Iterator[Any]:
    """Yields the objects and functions that bindings refer to, be it by way of macros."""
    values = [key.value for key in keys]
    while values:
        for reference in gin_internals.iterate_references(values.pop()):
            if macro := _macro_of(reference):
                values.append(_Key.of_macro(macro).value)
            else:
                yield reference


def _scope_of(reference: Any) -> str:
    return reference.scoped_selector.rpartition("/")[0]


def _reached(command: str) -> set[_Key]:
    """Returns the bindings that a command hangs on: not those of what other files put in another's place."""
    found: set[_Key] = set()
    made = [("", command)]
    for scope, selector in made:  # which grows meanwhile
        keys = _bound(scope, selector)
        found.update(keys)
        others = [(_scope_of(r) or scope, r.configurable.selector) for r in _references(keys)]
        made += [other for other in dict.fromkeys(others) if other not in made]
    return found


def _read(command: str) -> set[_Key]:
    """Returns the bindings that are read: what a command hangs on, and what a user's own code has decorated.

    That takes its bindings wherever it is called.
    """
    return _reached(command) | {key for key in _parameters_bound() if not _is_imported(key)}


def _check_read(read: set[_Key], typed: Sequence[_Key]) -> None:
    """Refuses parameters and macros that are typed of something that the command does not make."""
    macros = _macros_behind(read)
    for key in typed:
        if key.selector == MACRO:
            kept = key.scope in macros
            there_are = [other for other in _parameters_bound() if key.scope in _macros_behind([other])]
            more = "; it is of {}"
        else:
            kept = key in read or not _is_imported(key)
            there_are = [other for other in read if other.parameter == key.parameter]
            more = "; there are {}"
        if not kept:
            names = ", ".join(sorted("/".join(filter(None, (k.scope, str(k)))) for k in there_are))
            raise UserError(
                f"{key} is set but nothing reads it: this command makes no such object"
                + (more.format(names) if names else "")
            )


def _parameters_bound() -> list[_Key]:
    """Returns all parameters that anything is bound to, whether or not a command hangs on them."""
    config = gin_internals._CONFIG.items()
    return [_Key(*key, name) for key, bound in config if key[1] != MACRO for name in bound]


def _is_imported(key: _Key) -> bool:
    configurable = gin_internals._REGISTRY.get_match(key.selector)
    return bool(getattr(configurable, "import_source", None))


def _macros_behind(keys: Iterable[_Key]) -> set[str]:
    """Returns the macros that parameters hang on, be it by way of others."""
    found: set[str] = set()
    values = [key.value for key in keys]
    while values:
        macros = {_macro_of(reference) for reference in gin_internals.iterate_references(values.pop())}
        values += [_Key.of_macro(name).value for name in macros - found if name]
        found.update(filter(None, macros))
    return found


def _check_values(command: str) -> None:
    """Refuses values that a parameter cannot have, and empty texts of the command, by the name it goes by."""
    reached = _reached(command)
    for (scope, selector), parameters in gin_internals._CONFIG.items():
        configurable = gin_internals._REGISTRY.get_match(selector)
        if selector.startswith("gin.") or configurable is None:
            continue
        hints, defaults = hints_of(configurable.wrapped), _defaults_of(configurable.wrapped)
        for parameter in parameters:
            if (key := _Key(scope, selector, parameter)) not in reached:
                continue
            *_, last = _chain(key)
            value = _resolved(last.value)
            if parameter in defaults and value is defaults[parameter]:
                continue
            check_value(str(last), value, hints.get(parameter, Any))
            if selector == command:
                check_not_empty(str(last), value)


def _resolved(value: Any) -> Any:
    """Returns a bound value with that of its macros, and `Later` or `UNKNOWN` where a call gives it."""
    if isinstance(value, list | tuple):
        return type(value)(map(_resolved, value))
    if isinstance(value, dict):
        return {_resolved(k): _resolved(v) for k, v in value.items()}
    if macro := _macro_of(value):
        return _resolved(_Key.of_macro(macro).value)
    if not isinstance(value, gin_internals.ConfigurableReference):
        return value
    made, name = value.configurable.wrapped, f"@{value.configurable.name}"
    if not value.evaluate:
        return Later(name, type(made))
    return Later(f"{name}()", made) if inspect.isclass(made) else UNKNOWN


def _defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


def _macro_of(value: Any) -> str | None:
    selector = getattr(value, "scoped_selector", "")
    return selector.removesuffix(f"/{MACRO}") if selector.endswith(f"/{MACRO}") else None


def _is_required(value: Any) -> bool:
    return getattr(value, "scoped_selector", None) == "gin.REQUIRED/gin.constant"
