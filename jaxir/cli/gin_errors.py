"""What gin's errors mean, in one sentence each."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import tokenize
import traceback
from collections.abc import Sequence
from pathlib import Path

from gin import config as gin_internals

from jaxir.cli.gin_files import unclosed
from jaxir.core.errors import suggest
from jaxir.core.installation import missing_recipe


def explain(error: BaseException, files: Sequence[str]) -> str:
    """Rewrites gin's message as one sentence with file and line, and suggests the name that was meant.

    Args:
      error: what gin has raised while it parsed.
      files: the gin files that it was given.
    """
    if isinstance(error, tokenize.TokenError):
        return next(
            (found for f in files if (found := unclosed(f))),
            "a --gin value or an included file: a bracket is not closed",
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RecursionError):
        lines = ["a name, a value or the includes are nested too deeply"]
    message = lines[0] if lines else type(error).__name__
    place = re.search(r'In file "([^"]+)", line (\d+)', str(error))
    where = f"{place[1]}:{place[2]}: " if place else ""
    if match := re.match(r"Configurable '([^']+)' doesn't have a parameter named '([^']+)'", message):
        known = _parameters_of(match[1])
        message = f"{match[1]} has no parameter {match[2]!r}{suggest(match[2], known)}"
    elif match := re.match(r"No configurable matching reference '@([^'()]+)", message):
        known = suggest(match[1], _known_selectors())
        message = (
            f"nothing is called {match[1]!r}{known}; bind what is your own in the gin file that imports it"
        )
    elif match := re.match(r"No configurable matching '([^']+)'", message):
        message = f"nothing is called {match[1]!r}{suggest(match[1], _known_selectors())}"
    elif match := re.search(r"Ambiguous selector '([^']+)', matches \[(.+?)\]", message):
        message = f"{match[1]!r} may be any of {match[2]}: add the module's name before it"
    elif match := re.match(
        r"Couldn't resolve selector (\S+); <module '([^']+)'.*has no attribute (\w+)", message
    ):
        message = f"{match[2]} has no {match[3]!r}{suggest(match[3], _names_in(match[2]))}"
    elif match := re.match(r"No module named '([^']+)'", message):
        parent, _, leaf = match[1].rpartition(".")
        message = f"no module named {match[1]!r}{suggest(leaf, _names_in(parent)) if parent else ''}"
        where += _importer(error)
    elif match := re.match(r"Unable to open file: (.+?)\. Searched", message):
        message = missing_recipe(match[1])
    if isinstance(error, SyntaxError) and error.lineno:
        where = f"{error.filename or '--gin'}:{error.lineno}: "
        token = re.search(r"Failed to parse token '(.*)'", str(error))
        message = f"{token[1]} is no value: text wants quotes, a macro %, an object @" if token else error.msg
        if re.match(r"\s*(from\s.*)?import\s.*,", error.text or ""):
            message = "gin imports one name on a line"
    return f"{where}{message:.800}"


def _importer(error: BaseException) -> str:
    """Says where a module that a gin file imports wants one that is missing; "" where the gin file does."""
    libraries = (str(Path(importlib.__file__).parent), str(Path(gin_internals.__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    return "".join(f"{f.filename}:{f.lineno}: " for f in frames[-1:] if not f.filename.startswith(libraries))


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
