"""gin at the edge: files and bindings in, one bound call out. The core never imports gin.

gin files use dynamic registration (`from __gin__ import dynamic_registration`, then plain imports), so any
function or class of the project, or of a user's own module, is configurable without being registered.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import pkgutil
import re
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config as gin_internals

from jaxir.errors import UserError, suggest

RECIPES = Path(__file__).resolve().parent.parent  # so that "gin/quickstart.gin" is found from any directory
PARSE_ERRORS = (
    *(ValueError, OSError, SyntaxError, ImportError, AttributeError, NameError, TypeError),
    tokenize.TokenError,
)


def bind(
    function: Callable[..., Any], files: Sequence[str], bindings: Sequence[str], flags: dict[str, Any]
) -> tuple[Callable[..., Any], set[str]]:
    """Parses gin files, then `NAME=VALUE` bindings; returns the bound function and what gin sets.

    A bare word as a value (`--gin.MODEL=st:all-MiniLM-L6-v2`) is a string; gin itself wants quotes round it.

    Args:
      function: the command's entry point.
      files: gin files, later ones override earlier ones.
      bindings: `NAME=VALUE`, applied last; NAME is a macro or `function.parameter`.
      flags: the flags that were given, to catch what is set twice.

    Raises:
      UserError: a file that does not exist, a misspelt binding or macro (with the name that was meant), a
        required value left open, or a parameter given both as a flag and as a binding.
    """
    gin.clear_config()
    gin.add_config_file_search_path(str(RECIPES))
    gin.external_configurable(function, module=function.__module__)
    logging.disable(logging.ERROR)  # gin logs a missing file besides raising
    try:
        gin.parse_config_files_and_bindings(list(files), [_quote(b) for b in bindings], finalize_config=False)
    except PARSE_ERRORS as error:
        raise UserError(_explain(error, files)) from error
    finally:
        logging.disable(logging.NOTSET)
    _check_macros()
    bound = gin.get_bindings(function, resolve_references=False)
    for flag in flags:
        if flag in bound:
            raise UserError(f"{flag} is given twice, by --{flag} and by a gin binding; keep one of them")
    gin.finalize()
    return gin.get_configurable(function), set(bound)


def open_macros(files: Sequence[str]) -> list[str]:
    """Returns the macros that gin files leave to be set (`NAME = %gin.REQUIRED`); [] for unreadable files."""
    gin.clear_config()
    gin.add_config_file_search_path(str(RECIPES))
    logging.disable(logging.ERROR)
    try:
        gin.parse_config_files_and_bindings(list(files), [], finalize_config=False)
    except PARSE_ERRORS:  # `bind` will say what is wrong
        return []
    finally:
        logging.disable(logging.NOTSET)
    return [scope for (scope, selector), p in gin_internals._CONFIG.items() if _is_open(selector, p)]


def operative_config() -> str | None:
    """Returns the bindings that the run has used, as a gin file; None where no gin was given."""
    return gin.config_str() if gin_internals.config_is_locked() else None


def _quote(binding: str) -> str:
    name, _, value = binding.partition("=")
    try:
        ast.literal_eval(value)
        return binding
    except (ValueError, SyntaxError):
        bare = not re.search(r"[@%\[\](){}'\"]", value)
        return f"{name}={value!r}" if bare else binding


def _check_macros() -> None:
    config = gin_internals._CONFIG
    defined = {scope for scope, selector in config if selector == "gin.macro"}
    used = {
        r.scoped_selector.removesuffix("/gin.macro")
        for r in gin_internals.iterate_references(config)
        if r.selector == "gin.macro"
    }
    for name in sorted(used - defined):
        raise UserError(f"macro {name} is used but never set{suggest(name, defined - used)}")
    for name in sorted(defined - used):
        raise UserError(f"macro {name} is set but nothing uses it{suggest(name, used)}")
    for (scope, selector), parameters in config.items():
        for parameter, value in parameters.items():
            if getattr(value, "scoped_selector", None) == "gin.REQUIRED/gin.constant":
                name = scope if selector == "gin.macro" else f"{selector.rsplit('.', 1)[-1]}.{parameter}"
                raise UserError(f"{name} must be set: --gin.{name}=...")


def _is_open(selector: str, parameters: dict[str, Any]) -> bool:
    values = [getattr(value, "scoped_selector", None) for value in parameters.values()]
    return selector == "gin.macro" and "gin.REQUIRED/gin.constant" in values


def _explain(error: BaseException, files: Sequence[str]) -> str:
    """Rewrites gin's message as one sentence with file and line, and suggests the name that was meant."""
    if isinstance(error, tokenize.TokenError):
        return next(
            (found for f in files if (found := _unclosed(f))),
            "a --gin value or an included file: a bracket is not closed",
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    place = re.search(r'In file "([^"]+)", line (\d+)', str(error))
    where = f"{place[1]}:{place[2]}: " if place else ""
    if match := re.match(r"Configurable '([^']+)' doesn't have a parameter named '([^']+)'", message):
        known = _parameters_of(match[1])
        message = f"{match[1]} has no parameter {match[2]!r}{suggest(match[2], known)}"
    elif match := re.match(r"No configurable matching '([^']+)'", message):
        message = f"nothing is called {match[1]!r}{suggest(match[1], _known_selectors())}"
    elif match := re.match(
        r"Couldn't resolve selector (\S+); <module '([^']+)'.*has no attribute (\w+)", message
    ):
        message = f"{match[2]} has no {match[3]!r}{suggest(match[3], _names_in(match[2]))}"
    elif match := re.match(r"No module named '([^']+)'", message):
        parent, _, leaf = match[1].rpartition(".")
        message = f"no module named {match[1]!r}{suggest(leaf, _names_in(parent)) if parent else ''}"
    elif match := re.match(r"Unable to open file: (.+?)\. Searched", message):
        message = f"gin file {match[1]} does not exist"
    if isinstance(error, SyntaxError) and error.lineno:
        where = f"{error.filename or '--gin'}:{error.lineno}: "
        token = re.search(r"Failed to parse token '(.*)'", str(error))
        message = f"{token[1]} is no value: text wants quotes, a macro %, an object @" if token else error.msg
    return where + message


def _unclosed(file: str) -> str | None:
    """Returns where a bracket of a gin file is opened that nothing closes, in a sentence; None if none is."""
    opened = []
    path = next((p for p in (Path(file), RECIPES / file) if p.is_file()), None)
    if path is None:
        return None
    try:
        with path.open("rb") as content:
            for token in tokenize.tokenize(content.readline):
                if token.type == tokenize.OP and token.string in "([{":
                    opened.append(token)
                elif token.type == tokenize.OP and token.string in ")]}" and opened:
                    opened.pop()
    except tokenize.TokenError:
        return (
            f"{path}:{opened[-1].start[0]}: {opened[-1].string} is not closed"
            if opened
            else f"{path}: text is not closed"
        )
    return None


def _parameters_of(selector: str) -> list[str]:
    configurable = gin_internals._REGISTRY.get_match(selector)
    return list(inspect.signature(configurable.wrapped).parameters) if configurable else []


def _known_selectors() -> list[str]:
    full = [s for s, _ in gin_internals._REGISTRY.items() if not s.startswith("gin.")]
    return sorted({".".join(s.split(".")[-n:]) for s in full for n in (1, 2)})


def _names_in(module: str) -> list[str]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return []
    return [*vars(found), *(m.name for m in pkgutil.iter_modules(getattr(found, "__path__", [])))]
