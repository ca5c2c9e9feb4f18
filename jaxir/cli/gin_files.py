"""gin files, their includes and typed bindings, read into `Bindings`."""

from __future__ import annotations

import ast
import importlib
import io
import pkgutil
import re
import tokenize
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from jaxir.cli.gin_bindings import REQUIRED, Bindings, Key, Macro, Reference
from jaxir.core.errors import UserError, suggest
from jaxir.core.installation import PACKAGE, find_recipe, missing_recipe

DEFAULT = "default"  # before a macro's name: its value where nothing else sets it
# Modules that were renamed when they moved, of those that a run's config.gin may import.
RENAMED = {"jaxir.evaluators.search": "corpus_search", "jaxir.experiments.plan": "grid_cells"}


class _Named(NamedTuple):
    """A reference as it is written."""

    name: str
    called: bool


class _Delegate(config_parser.ParserDelegate):
    """What gin's parser makes of `@NAME` and `%NAME`."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> _Named:
        return _Named(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def read_files(into: Bindings, files: Sequence[str]) -> None:
    """Reads gin files, later ones override earlier ones, and gives macros their defaults.

    Raises:
      UserError: a file does not exist, includes itself, or says what cannot be; with file and line.
    """
    defaults: dict[Key, Any] = {}
    for file in files:
        _read_file(into, file, defaults, ())
    for key, value in defaults.items():
        into.values.setdefault(key, value)
    used = into.macros_behind(into.values)
    for key in defaults:
        if key.scope not in used:
            raise UserError(
                f"{DEFAULT}/{key} gives a macro a value, but nothing uses it{suggest(str(key), used)}"
            )


def read_text(into: Bindings, text: str) -> None:
    """Reads the text of a gin file such as `Bindings.text` returns."""
    for key, value in _read(into, with_moved_imports(text), "config.gin", {}, {}, ()):
        into.values[key] = value


def read_typed(into: Bindings, bindings: Sequence[str]) -> None:
    """Reads `NAME=VALUE` and `--name=VALUE`, each NAME a macro, a short name or `function.parameter`.

    A bare word as a value is text: `MODEL=st:all-MiniLM-L6-v2`.

    Raises:
      UserError: a binding says what cannot be, or something is set twice.
    """
    for binding in bindings:
        name, _, value = (part.strip() for part in binding.partition("="))
        spelled = name if name.startswith("--") else f"--gin.{name}"
        if name.startswith("--"):
            name = name.removeprefix("--").replace("-", "_").upper()
        for key, found in _read(into, f"{name} = {_quoted(value)}", spelled, into.imported, {}, ()):
            if key in into.typed and spelled != into.typed[key]:
                raise UserError(
                    f"{key} is given twice, by {into.typed[key]} and by {spelled}; keep one of them"
                )
            into.typed[key] = spelled
            into.values[key] = found


def _quoted(value: str) -> str:
    try:
        ast.literal_eval(value)
        return value
    except (ValueError, SyntaxError):
        return value if re.search(r"^[@%]|[\[\](){}'\"]", value) else repr(value)


def _read_file(into: Bindings, file: str, defaults: dict[Key, Any], within: tuple[Path, ...]) -> None:
    path = find_recipe(file)
    if path is None:
        raise UserError(missing_recipe(file))
    if path.resolve() in [other.resolve() for other in within]:
        raise UserError(f"{within[-1]} includes {path}: gin files that include themselves have no end")
    text = with_moved_imports(path.read_text(encoding="utf-8", errors="replace"))
    for key, value in _read(into, text, str(path), {}, defaults, (*within, path)):
        into.values[key] = value


def _read(
    into: Bindings,
    text: str,
    name: str,
    modules: dict[str, types.ModuleType],
    defaults: dict[Key, Any],
    within: tuple[Path, ...],
) -> Any:
    """Yields keys and values of a gin text, after what it includes; fills `defaults`.

    Args:
      into: knows functions and classes.
      text: what to read.
      name: what errors call it.
      modules: those that it imports are added.
      defaults: macros with values for where nothing else sets them.
      within: the files that include it, and itself.
    """
    stream = io.StringIO(text)
    stream.name = name
    line = 0
    try:
        for statement in config_parser.ConfigParser(stream, _Delegate()):
            line = statement.location.line_num
            if isinstance(statement, config_parser.IncludeStatement):
                _read_file(into, statement.filename, defaults, within)
            elif isinstance(statement, config_parser.ImportStatement):
                if not statement.module.startswith("__gin__."):
                    modules[statement.bound_name()] = _imported(statement)
                    into.imported |= modules
            elif isinstance(statement, config_parser.BindingStatement):
                value = _resolved(into, statement.value, modules)
                if statement.arg_name:
                    selector = into.find(statement.selector, modules)
                    yield into.key(statement.scope, selector, statement.arg_name), value
                elif statement.scope == DEFAULT:
                    defaults[Key.of_macro(statement.selector)] = value
                else:
                    yield Key.of_macro(statement.selector), value
    except tokenize.TokenError:
        after = f" after line {line}" if line else ""
        raise UserError(f"{name}: a bracket or a text is opened{after} and never closed") from None
    except RecursionError:
        raise UserError(f"{name}: brackets are nested too deeply") from None
    except SyntaxError as error:
        raise UserError(_explained(error, name)) from error
    except UserError as error:
        raise UserError(
            f"{name}:{line}: {error}" if within and not _has_place(error) else str(error)
        ) from error


def _has_place(error: UserError) -> bool:
    return bool(re.match(r"\S+:\d+: |\S+ includes |gin file ", str(error)))


def _explained(error: SyntaxError, name: str) -> str:
    """Returns what gin's parser does not understand, in a sentence."""
    message = str(error.msg)
    if re.match(r"\s*(from\s.*)?import\s.*,", error.text or ""):
        message = "gin imports one name on a line"
    elif token := re.search(r"Failed to parse token '(.*)'", message):
        message = f"{token[1]} is no value: text wants quotes, a macro %, an object @"
    return f"{name}:{error.lineno}: {message:.800}"


def _imported(statement: config_parser.ImportStatement) -> types.ModuleType:
    """Imports a module, and returns what its name in the file stands for."""
    try:
        module = importlib.import_module(statement.module)
    except ModuleNotFoundError as error:
        parent, _, leaf = str(error.name).rpartition(".")
        meant = suggest(leaf, _names_in(parent)) if parent else ""
        by = "" if statement.module.startswith(str(error.name)) else f", which {statement.module} imports"
        raise UserError(f"no module named {error.name!r}{by}{meant}") from error
    except Exception as error:
        raise UserError(f"{statement.module} cannot be imported: {type(error).__name__}: {error}") from error
    if statement.is_from or statement.alias:
        return module
    return importlib.import_module(statement.module.partition(".")[0])


def _names_in(module: str) -> list[str]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return []
    return [*vars(found), *(m.name for m in pkgutil.iter_modules(getattr(found, "__path__", [])))]


def _resolved(into: Bindings, value: Any, modules: dict[str, types.ModuleType]) -> Any:
    """Returns a parsed value whose references name functions and classes by their selectors."""
    if isinstance(value, _Named):
        scope, _, name = value.name.rpartition("/")
        return Reference(scope, into.find(name, modules), value.called)
    if isinstance(value, list | tuple):
        return type(value)(_resolved(into, part, modules) for part in value)
    if isinstance(value, dict):
        return {_resolved(into, k, modules): _resolved(into, v, modules) for k, v in value.items()}
    return REQUIRED if value == REQUIRED else value


def with_moved_imports(text: str) -> str:
    """Returns the text of a gin file with the present names of modules that it imports by earlier ones.

    So `RUN/config.gin` of a run from before modules moved still repeats the run. A file's base name occurs
    once in jaxir, so it finds the module.
    """

    def moved(line: re.Match[str]) -> str:
        package, name, alias = line.groups()
        if _is_file(f"{package}.{name}"):
            return line[0]
        now = RENAMED.get(f"{package}.{name}", name)
        rooms = [found.parent for found in PACKAGE.rglob(f"{now}.py")]
        if package == "jaxir.evaluators":
            rooms = [room for room in rooms if room.name == "evaluators"]
        if len(rooms) != 1:
            return line[0]
        room = ".".join(("jaxir", *rooms[0].relative_to(PACKAGE).parts))
        return f"from {room} import {now}" + (alias or (f" as {name}" if now != name else ""))

    return re.sub(r"^from (jaxir(?:\.\w+)*) import (\w+)( as \w+)?$", moved, text, flags=re.M)


def _is_file(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()
