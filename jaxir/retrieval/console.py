"""Prints the documents that answer a question, and answers questions in an interactive session."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import has_text
from jaxir.retrieval.searcher import Searcher, WeightsSearcher

SNIPPET = 160  # maximum width of a snippet, in terminal columns
INDENT = 13  # terminal column at which names and snippets begin


def answer(searcher: Searcher | WeightsSearcher, question: str, k: int) -> str:
    """Returns the best `k` documents as lines (rank, score, name, id, snippet), wrapped on a terminal."""
    scores, ids = searcher.search([question], k)
    documents = searcher.index.documents
    lines = []
    for rank, (score, doc_id) in enumerate(zip(scores[0], ids[0], strict=False), start=1):
        name, snippet = doc_id, ""
        if documents is not None:
            document = documents[doc_id]
            if document.title:
                name = f"{document.title}  [{doc_id}]" if document.title != doc_id else doc_id
            snippet = _shorten(document.text)
        head = f"{rank:3d}  {score:.4f}  "
        lines += [head.ljust(INDENT) + name, *([" " * INDENT + snippet] if snippet else [])]
    return _fit("\n".join(lines) or "nothing found")


def converse(searcher: Searcher | WeightsSearcher, k: int) -> None:
    """Answers each line of standard input until its end or Ctrl-C. On a terminal, errors do not end it."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` line editing and history)

        print(_fit(f"{searcher.index.info.count:,} documents; type a question, or Ctrl-D to leave"))
        prompt = "question> "
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            question = input(prompt).strip()
            if has_text(question):
                if not prompt:
                    print(question)
                try:
                    print(answer(searcher, question, k), flush=True)
                except UserError as error:
                    if not prompt:
                        raise
                    print(_fit(str(error)))
                print()
    if prompt:
        print()


def _fit(text: str) -> str:
    """Returns `text` without control characters, wrapped at the width of a terminal."""
    lines = ["".join(c for c in line if unicodedata.category(c) != "Cc") for line in text.split("\n")]
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        indent = " " * (INDENT if width >= 3 * INDENT else 2)
        lines = [part for line in lines for part in _wrap(line, width, indent)]
    return "\n".join(lines)


def _wrap(line: str, width: int, indent: str) -> Iterator[str]:
    """Yields a line in parts of at most `width` columns; all but the first start with `indent`."""
    part = line[: len(line) - len(line.lstrip())]
    if len(part) >= INDENT:
        part = indent
    empty = True  # the line `part` has no word yet
    for space, unit in _units(line.strip()):
        pieces = [unit]
        if _columns(indent + unit) > width:  # the unit is longer than a line: break it anywhere
            pieces = list(unit)
        for piece in pieces:
            if not empty and _columns(part + space + piece) > width:
                yield part
                part, empty = indent, True
            part += piece if empty else space + piece
            empty, space = False, ""
    yield part


def _shorten(text: str) -> str:
    """Returns the beginning of a text as one line of at most `SNIPPET` columns, cut between words."""
    found, used = "", 0
    for space, unit in _units(text[: 4 * SNIPPET].strip()):
        space = " " * bool(space)
        used += _columns(space + unit)
        if used > SNIPPET - len(" ..."):
            return (found or unit[: SNIPPET - len(" ...")]) + " ..."
        found += space + unit
    return found + " ..." * (len(text) > 4 * SNIPPET)


def _units(text: str) -> Iterator[tuple[str, str]]:
    """Yields (white space before, unbreakable unit); a unit is a word, or one wide character of a word."""
    for space, word in re.findall(r"(\s*)(\S+)", text):
        start = 0
        for at in range(1, len(word)):
            closing = unicodedata.category(word[at])[0] in "MP" and unicodedata.category(word[at]) != "Ps"
            if (_columns(word[at - 1]) == 2 or _columns(word[at]) == 2) and not closing:
                yield (space if start == 0 else ""), word[start:at]
                start = at
        yield (space if start == 0 else ""), word[start:]


def _columns(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)
