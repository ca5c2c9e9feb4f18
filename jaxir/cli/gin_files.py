"""Reads gin files, their includes and bindings of the command line into `Bindings`."""

from __future__ import annotations

import ast
import importlib
import io
import pkgutil
import re
import tokenize
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

from jaxir.cli.gin_bindings import Bindings, Key, Macro, Reference, given_twice, with_selectors
from jaxir.core.errors import UserError, suggest
from jaxir.core.installation import PACKAGE, find_recipe, missing_recipe

DEFAULT = "default"  # scope of defaults: default/NAME is the value of the macro NAME if nothing else sets it
# Old name -> new name of renamed modules that an earlier run's config.gin may import.
RENAMED = {"jaxir.evaluators.search": "corpus_search", "jaxir.experiments.plan": "grid_cells"}


class _Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(scope, name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class Reader:
    """Reads gin files, then the command line's bindings, into `Bindings`; later values win."""

    def __init__(self, into: Bindings) -> None:
        self._into = into
        self._defaults: dict[Key, Any] = {}

    def files(self, files: Sequence[str]) -> None:
        """Reads gin files, then sets macros that are still unset to their defaults."""
        for file in files:
            self._file(file, ())
        for key, value in self._defaults.items():
            self._into.values.setdefault(key, value)
        used = self._into.macros_behind(self._into.values)
        for key in self._defaults:
            if key.scope not in used:
                meant = suggest(str(key), used)
                raise UserError(f"{DEFAULT}/{key} gives a macro a value, but nothing uses the macro{meant}")

    def text(self, text: str, name: str = "config.gin", within: tuple[Path, ...] = ()) -> None:
        """Reads the text of the gin file `name`; `within` are the files that include it."""
        for key, value in self._statements(with_moved_imports(text), name, {}, within):
            self._into.values[key] = value

    def typed(self, bindings: Sequence[str]) -> None:
        """Reads `NAME=VALUE` and `--name=VALUE`; text needs no quotes: `MODEL=st:all-MiniLM-L6-v2`."""
        typed = self._into.typed
        for binding in bindings:
            name, _, value = (part.strip() for part in binding.partition("="))
            spelled = name if name.startswith("--") else f"--gin.{name}"
            if name.startswith("--"):
                name = name.removeprefix("--").replace("-", "_").upper()
            statement = f"{name} = {_quoted(value)}"
            for key, found in self._statements(statement, spelled, self._into.imported, ()):
                if typed.setdefault(key, spelled) != spelled:
                    raise given_twice(key, typed[key], spelled)
                self._into.values[key] = found

    def _file(self, file: str, within: tuple[Path, ...]) -> None:
        path = find_recipe(file)
        if path is None:
            raise UserError(missing_recipe(file))
        if path.resolve() in [other.resolve() for other in within]:
            raise UserError(f"{within[-1]} includes {path}, which includes it: remove one of the includes")
        self.text(path.read_text(encoding="utf-8", errors="replace"), str(path), (*within, path))

    def _statements(
        self, text: str, name: str, imported: dict[str, types.ModuleType], within: tuple[Path, ...]
    ) -> Iterator[tuple[Key, Any]]:
        """Yields keys and values of a gin text, and reads its includes; adds its modules to `imported`."""
        stream = io.StringIO(text)
        stream.name = name
        line = 0
        try:
            for statement in config_parser.ConfigParser(stream, _Delegate()):
                line = statement.location.line_num
                if isinstance(statement, config_parser.IncludeStatement):
                    self._file(statement.filename, within)
                elif isinstance(statement, config_parser.ImportStatement):
                    if not statement.module.startswith("__gin__."):
                        imported[statement.bound_name()] = _imported(statement)
                        self._into.imported |= imported
                elif isinstance(statement, config_parser.BindingStatement):
                    value = with_selectors(statement.value, lambda name: self._into.find(name, imported))
                    if statement.arg_name:
                        selector = self._into.find(statement.selector, imported)
                        yield self._into.key(statement.scope, selector, statement.arg_name), value
                    elif statement.scope == DEFAULT:
                        self._defaults[Key.of_macro(statement.selector)] = value
                    else:
                        yield Key.of_macro(statement.selector), value
        except tokenize.TokenError:
            after = f" after line {line}" if line else ""
            raise UserError(
                f"{name}: a bracket or a quote is opened{after} and never closed: close it"
            ) from None
        except SyntaxError as error:
            raise UserError(_explained(error, name)) from error
        except UserError as error:
            has_place = re.match(r"\S+:\d+: |\S+ includes |gin file ", str(error))
            raise UserError(f"{name}:{line}: {error}" if within and not has_place else str(error)) from error


def _quoted(value: str) -> str:
    try:
        ast.literal_eval(value)
        return value
    except (ValueError, SyntaxError):
        return value if re.search(r"^[@%]|[\[\](){}'\"]", value) else repr(value)


def _explained(error: SyntaxError, name: str) -> str:
    """Returns the error message for a gin text that gin's parser could not read."""
    message = str(error.msg)
    if re.match(r"\s*(from\s.*)?import\s.*,", error.text or ""):
        message = "gin allows one name in an import line"
    elif token := re.search(r"Failed to parse token '(.*)'", message):
        message = f"{token[1]} is not a value: write text in quotes, %MACRO or @OBJECT()"
    return f"{name}:{error.lineno}: {message:.800}"


def _imported(statement: config_parser.ImportStatement) -> types.ModuleType:
    """Imports a module; returns the module to which the import statement binds a name."""
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


def with_moved_imports(text: str) -> str:
    """Returns the text of a gin file, with modules imported from the packages where they are today.

    The config.gin of a run that was trained before modules moved therefore still repeats the run. A module's
    base name occurs once in jaxir, so it finds the module.
    """

    def moved(line: re.Match[str]) -> str:
        package, name, alias = line.groups()
        if PACKAGE.parent.joinpath(*package.split("."), f"{name}.py").is_file():
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
