"""Files that hold one JSON array, read item by item."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxir.core.errors import BadInputError
from jaxir.data.formats.lines import MalformedRecord, decode_line, numbered_lines

_LINES_AT_ONCE = 2048  # number of lines read at a time
_SPACE = re.compile(r"\s*")


def holds_array(path: str | Path) -> bool:
    """Returns whether the first line that is not blank begins a JSON array."""
    return next(numbered_lines(path), (0, b""))[1].lstrip().startswith(b"[")


def json_array(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yields (line number, item) for the items of a JSON array, with few items in memory at a time.

    An error is never skipped, because nothing marks the start of the next item.
    """
    window = _Window(path)
    window.expect("[", "a JSON array of objects is needed")
    first = True
    while not (mark := window.peek()).startswith("]"):
        if not first:
            window.expect(",", "a comma or the end of the JSON array is missing")
        elif not mark:
            break
        first = False
        yield window.item()
    window.expect("]", "the JSON array has no end")
    if window.peek():
        raise BadInputError(path, window.line, "there is text after the end of the JSON array: remove it")


class _Window:
    """A part of a text file that moves forward. `line` is the line number of the current position."""

    def __init__(self, path: str | Path):
        self._path, self._lines = path, _numbered_texts(path)
        self._text, self._at, self.line = "", 0, 1
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """Skips white space and returns the next character, without consuming it; "" at the end."""
        while True:
            self._advance(_SPACE.match(self._text, self._at).end() - self._at)
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def expect(self, mark: str, otherwise: str) -> None:
        if (found := self.peek()) != mark:
            raise BadInputError(self._path, self.line - (not found), otherwise)
        self._advance(1)

    def item(self) -> tuple[int, Any]:
        self.peek()
        while True:
            try:
                item, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # The item may only seem malformed because the window ends within it: then read more text.
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - 8
                line = self.line + self._text.count("\n", self._at, error.pos)
                if cut and self._more():
                    continue
                raise BadInputError(
                    self._path, line, f"not valid JSON ({error.msg}): correct the file"
                ) from error
            line = self.line
            self._advance(end - self._at)
            return line, item

    def _advance(self, count: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _more(self) -> bool:
        added = "".join(itertools.islice(self._lines, _LINES_AT_ONCE))
        self._text, self._at = self._text[self._at :] + added, 0
        return bool(added)


def _numbered_texts(path: str | Path) -> Iterator[str]:
    """Yields the lines of a file with line ends; blank lines are yielded together with the next line."""
    last = 0
    for number, raw in numbered_lines(path):
        try:
            text = decode_line(raw)
        except MalformedRecord as fault:
            raise BadInputError(path, number, f"{fault.kind} {fault.detail}".strip()) from fault
        yield "\n" * (number - last - 1) + text + "\n"
        last = number
