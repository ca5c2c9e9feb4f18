"""Reads the docstrings in Python source files: one entry for each function, class and module."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.data.formats.sources import Document, Query

# Entire packages are held out, so that no text of a test package is trained on.
TEST_PACKAGES = frozenset({"scipy", "optax", "rich"})
DEV_PACKAGES = frozenset({"flax", "chex", "orbax", "requests"})
SPLITS = ("train", "dev", "test")

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\"'(:0-9])")
# A line that ends the summary without a blank line before it: "Args:", ":param x:", ">>> f()", "-----".
_SECTION = re.compile(r"\s*(\w+( \w+)?:\s*$|:\w+|@\w+|>>>|---|===|[-*] )")
_WORD = re.compile(r"\w+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MIN_SUMMARY_WORDS = 3
_MAX_SUMMARY_WORDS = 40
_MAX_SIGNATURE = 300


class Entry(NamedTuple):
    """The documentation of one function, class or module.

    Attributes:
      name: dotted name in the source tree.
      summary: the first sentence of the docstring, on one line.
      signature: the call of a function or class, without annotations; empty for a module.
      rest: the docstring without its summary.
    """

    name: str
    summary: str
    signature: str
    rest: str

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def split(self) -> str:
        package = self.package
        return "test" if package in TEST_PACKAGES else "dev" if package in DEV_PACKAGES else "train"

    @property
    def document(self) -> Document:
        return Document(self.name, self.name, f"{self.signature}\n{self.rest}".strip())

    @property
    def query(self) -> Query:
        """The query. Its id differs from the document's, because BEIR drops hits that have the query's id."""
        return Query(f"q:{self.name}", self.summary)


def entries(module: str, path: Path) -> list[Entry]:
    """Returns the entries of a file with the dotted name `module`; [] if Python cannot parse the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides warnings about invalid escapes in sources
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return []
    return [*_entries_of(tree, module, ""), *_inside(tree, module)]


def _inside(node: ast.AST, prefix: str) -> Iterator[Entry]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With):
            yield from _inside(child, prefix)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name.startswith("_"):
                continue
            name = f"{prefix}.{child.name}"
            yield from _entries_of(child, name, _signature(child))
            if isinstance(child, ast.ClassDef):
                yield from _inside(child, name)


def _entries_of(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, signature: str
) -> Iterator[Entry]:
    docstring = (ast.get_docstring(node) or "").strip()
    if "\0" in docstring or _SURROGATE.search(docstring):
        return
    summary, rest = split_docstring(docstring)
    words = _WORD.findall(summary)
    is_prose = not summary.startswith((f"{name.rpartition('.')[2]}(", ">>>", ".. "))
    if is_prose and rest and _MIN_SUMMARY_WORDS <= len(words) <= _MAX_SUMMARY_WORDS:
        entry = Entry(name, summary, signature, rest)
        if not _contains(entry.document.contents, summary):  # the passage must not contain the query
            yield entry


def split_docstring(docstring: str) -> tuple[str, str]:
    """Returns the first sentence of a docstring, on one line, and the rest, without repeats of that sentence.

    The rest is "" if it has no words.
    """
    lines = docstring.strip().splitlines()
    is_end = (i for i, line in enumerate(lines) if not line.strip() or _SECTION.match(line))
    end = next(is_end, len(lines))
    summary, *more = _SENTENCE_END.split(" ".join(" ".join(lines[:end]).split()), maxsplit=1)
    rest = "\n".join([*more, *lines[end:]]).strip()
    if _contains(rest, summary):
        rest = re.sub(
            r"\W+".join(_WORD.findall(summary)) + r"\b[.!?:]*", "", rest, flags=re.IGNORECASE
        ).strip()
    return summary, rest if _WORD.search(rest) else ""


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns e.g. "minimize(fun, x0, args=())", without annotations and self; a class has its __init__'s."""
    function: ast.AST | None = node
    if isinstance(node, ast.ClassDef):
        inits = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        function = next(inits, None)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    arguments = function.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    for argument in filter(None, every):
        argument.annotation = None
    parameters = re.sub(r"^(self|cls)(, /)?(, |$)", "", ast.unparse(arguments))
    if len(parameters) > _MAX_SIGNATURE:
        parameters = parameters[:_MAX_SIGNATURE].rpartition(", ")[0] + ", ..."
    return f"{node.name}({parameters})"


def _contains(text: str, words: str) -> bool:
    return f" {normal(words)} " in f" {normal(text)} "


def normal(text: str) -> str:
    """Returns the lower-case words of a text, separated by spaces."""
    return " ".join(_WORD.findall(text.lower()))
