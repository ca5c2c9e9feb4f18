"""gin files as texts: what gin itself does not say of them in a sentence."""

from __future__ import annotations

import contextlib
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.core.installation import PACKAGE, RECIPES, find_recipe, included_in

# Modules that were renamed when they moved, of those that a run's config.gin may import.
RENAMED = {"jaxir.evaluators.search": "corpus_search", "jaxir.experiments.plan": "grid_cells"}
_MACRO = re.compile(r"^(?:default/)?(\w+) *=", re.M)
MOST_NESTED = 50  # brackets within each other; gin, which recurses, ends at some hundreds


def check_nesting(where: str, text: str) -> None:
    """Raises a UserError where brackets of a gin file or of a typed binding are nested too deeply for gin.

    Args:
      where: what the text is called: a file, or the binding's name.
      text: the gin.
    """
    depth = 0
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # gin reports these itself
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
            if depth > MOST_NESTED:
                raise UserError(
                    f"{where}:{token.start[0]}: brackets are nested more than {MOST_NESTED} deep; write the"
                    " value without them"
                )


def check_includes(file: Path, within: tuple[Path, ...] = ()) -> None:
    """Raises a UserError where a gin file includes itself, be it by way of others."""
    path = find_recipe(file)
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path else ""
    except OSError:  # gin says so, as of one that is not there
        return
    chain = (*within, path)
    if path and path.resolve() in [other.resolve() for other in within]:
        raise UserError(f"{within[-1]} includes {path}: gin files that include themselves have no end")
    check_nesting(str(path), text)
    for name in included_in(text):
        check_includes(Path(name), chain)


def with_moved_imports(file: str) -> str | None:
    """Returns the text of a gin file with the present names of modules that it imports by earlier ones.

    So `RUN/config.gin` of a run from before modules moved still repeats the run. A file's base name occurs
    once in jaxir, so it finds the module.

    Returns:
      The text; None if the file imports no module by an earlier name.
    """
    path = find_recipe(file)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")

    def moved(line: re.Match[str]) -> str:
        package, name = line.groups()
        if _is_module(f"{package}.{name}"):
            return line[0]
        now = RENAMED.get(f"{package}.{name}", name)
        rooms = [found.parent for found in PACKAGE.rglob(f"{now}.py")]
        if package == "jaxir.evaluators":
            rooms = [room for room in rooms if room.name == "evaluators"]
        if len(rooms) != 1:
            return line[0]
        room = ".".join(("jaxir", *rooms[0].relative_to(PACKAGE).parts))
        return f"from {room} import {now}" + (f" as {name}" if now != name else "")

    changed = re.sub(r"^from (jaxir(?:\.\w+)*) import (\w+)$", moved, text, flags=re.M)
    return None if changed == text else changed


def _is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def shipped_macros() -> set[str]:
    """Returns the macros that jaxir's own gin files know: none of them is a misspelling."""
    files = (RECIPES / "gin").rglob("*.gin")
    return {name for file in files for name in _MACRO.findall(file.read_text())}


def macros_in(files: Iterable[str]) -> set[str]:
    """Returns the macros that gin files and those that they include set."""
    found, left, seen = set(), list(files), set()
    while left:
        path = find_recipe(left.pop())
        if path is None or path in seen:
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8", errors="replace")
        found |= set(_MACRO.findall(text))
        left += included_in(text)
    return found


def unclosed(file: str) -> str | None:
    """Returns where a bracket of a gin file is opened that nothing closes, in a sentence; None if none is."""
    opened = []
    path = find_recipe(file)
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
