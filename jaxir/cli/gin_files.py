"""gin files as texts: what gin itself does not say of them in a sentence."""

from __future__ import annotations

import contextlib
import io
import re
import tokenize
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.core.installation import RECIPES, find_recipe, included_in

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


def shipped_macros() -> set[str]:
    """Returns the macros that jaxir's own gin files know: none of them is a misspelling."""
    files = (RECIPES / "gin").rglob("*.gin")
    return {name for file in files for name in re.findall(r"^(?:default/)?(\w+) *=", file.read_text(), re.M)}


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
