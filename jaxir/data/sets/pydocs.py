"""Real text found on any machine: the documentation of the installed Python packages.

For each documented public function, class and module the query is the summary line of its docstring, the
passage is its name, signature and the rest of the docstring. Sources are parsed, never imported. The same
packages give the same pairs.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError, suggest
from jaxir.core.progress import progress
from jaxir.data.formats.sources import Document, PairExample, Qrel, Query
from jaxir.data.sets import docstring_workers
from jaxir.data.sets.collection_files import write_collection
from jaxir.storage.files import atomic_directory

# Whole packages are held out, so that nothing of a test package is ever trained on.
TEST_PACKAGES = frozenset({"scipy", "optax", "rich"})
DEV_PACKAGES = frozenset({"flax", "chex", "orbax", "requests"})
SPLITS = ("train", "dev", "test")

# Tools of the environment rather than text to learn from; they differ from machine to machine.
_SKIPPED_PACKAGES = frozenset(
    {"jaxir", "pip", "setuptools", "pkg_resources", "wheel", "_distutils_hack", "idlelib", "lib2to3"}
    | {"turtledemo", "ensurepip", "test"}
)
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "_tests", "site-packages", "dist-packages", "__pycache__", "third_party"}
    | {"vendor", "_vendor", "vendored", "_vendored", "_vendored_packages", "extern", "externals"}
)
# Tests, code written by programs, and one large package's models, which are copies of each other.
_SKIPPED_FILE = re.compile(r"(test_.*|.*_test|.*_tests|conftest|gen_.*|.*_gen|.*_generated|.*_pb2)\.py")
_SKIPPED_MODULE = re.compile(r"transformers\.models\..*|pydoc_data\.topics")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\"'(:0-9])")
# A line that ends the summary although no blank line precedes it: "Args:", ":param x:", ">>> f()", "-----".
_SECTION = re.compile(r"\s*(\w+( \w+)?:\s*$|:\w+|@\w+|>>>|---|===|[-*] )")
_WORD = re.compile(r"\w+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MIN_SUMMARY_WORDS = 3
_MAX_SUMMARY_WORDS = 40
_MAX_SIGNATURE = 300


class Entry(NamedTuple):
    """The documentation of one function, class or module.

    Attributes:
      name: dotted name, as the source tree has it.
      summary: the first sentence of the docstring, on one line.
      signature: of a function or class, without annotations; empty for a module.
      rest: the docstring without its summary.
    """

    name: str
    summary: str
    signature: str
    rest: str

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]

    @property
    def split(self) -> str:
        """The split its package belongs to."""
        return _split_of(self.package)

    @property
    def document(self) -> Document:
        """The passage."""
        return Document(self.name, self.name, f"{self.signature}\n{self.rest}".strip())

    @property
    def query(self) -> Query:
        """The query. Its id is not the passage's: BEIR's own evaluator drops a hit with the query's id."""
        return Query(f"q:{self.name}", self.summary)


def collect(roots: Iterable[Path] | None = None) -> list[Entry]:
    """Returns the entries of all packages under `roots` (default: those of this interpreter), by name.

    Entries are duplicates if their summaries, or the rests of their docstrings, are the same words. Of those
    only one is kept: in a test package, else in a dev package, else the first by name. So no held-out text is
    trained on.
    """
    return _collect(tuple(installed_roots() if roots is None else roots))


def installed_roots() -> list[Path]:
    """Returns the directories of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")))


def read_pairs(split: str) -> Iterator[PairExample]:
    """Yields the pairs of "train", "dev" or "test"."""
    if split not in SPLITS:
        raise UserError(f"pydocs has no split {split!r} (has: {', '.join(SPLITS)}){suggest(split, SPLITS)}")
    for entry in collect():
        if entry.split == split:
            query, document = entry.query, entry.document
            yield PairExample(query.id, query.text, document.id, document.contents)


def write_beir(output: str | Path, entries: list[Entry]) -> None:
    """Writes a BEIR folder of all entries with qrels/{train,dev,test}.tsv.

    Its subfolders dev/ and test/ are BEIR folders too: the held-out packages alone, to search among.

    Raises:
      UserError: `output` exists already, or there is nothing to write.
    """
    if not entries:
        raise UserError("no documented function, class or module was found in the installed packages")
    with atomic_directory(output) as folder:
        _write_folder(folder, entries, SPLITS)
        for split in ("dev", "test"):
            (folder / split).mkdir()
            _write_folder(folder / split, [e for e in entries if e.split == split], [split])


def counts(entries: list[Entry]) -> dict[str, collections.Counter[str]]:
    """Returns the number of entries of each package, by split."""
    return {s: collections.Counter(e.package for e in entries if e.split == s) for s in SPLITS}


def _write_folder(folder: Path, entries: list[Entry], splits: Iterable[str]) -> None:
    write_collection(
        folder,
        documents=(e.document for e in entries),
        queries=(e.query for e in entries),
        qrels={s: [Qrel(e.query.id, e.document.id, 1) for e in entries if e.split == s] for s in splits},
    )


def _split_of(package: str) -> str:
    return "test" if package in TEST_PACKAGES else "dev" if package in DEV_PACKAGES else "train"


@functools.lru_cache(maxsize=1)
def _collect(roots: tuple[Path, ...]) -> list[Entry]:
    files = sorted({(module, path) for root in roots for module, path in _modules(root)})
    found: list[Entry] = []
    for entries_of_file in progress(
        docstring_workers.read(files), total=len(files), what="reading docstrings", unit="files"
    ):
        found.extend(entries_of_file)
    found.sort(key=lambda e: (SPLITS[::-1].index(e.split), e.name))
    seen: set[object] = set()
    kept = []
    for entry in found:
        marks = {entry.name, ("summary", _normal(entry.summary)), ("rest", _normal(entry.rest))}
        if not marks & seen:
            kept.append(entry)
        seen |= marks
    return sorted(kept)


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (dotted name, file) of each module under `root` that is worth reading."""
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        names = [*parts[:-1], path.stem] if path.stem != "__init__" else list(parts[:-1])
        if (
            names
            and not _SKIPPED_DIRECTORIES.intersection(parts[:-1])
            and not _SKIPPED_FILE.fullmatch(path.name)
            and not _SKIPPED_MODULE.fullmatch(".".join(names))
            and names[0] not in _SKIPPED_PACKAGES
            and all(name.isidentifier() for name in names)
        ):
            yield ".".join(names), path


def entries(module: str, path: Path) -> list[Entry]:
    """Returns the entries of a file, none where Python cannot parse it.

    Args:
      module: its dotted name.
      path: it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
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
    if not _is_text(docstring):
        return
    summary, rest = split_docstring(docstring)
    words = _WORD.findall(summary)
    is_prose = not summary.startswith((f"{name.rpartition('.')[2]}(", ">>>", ".. "))
    if is_prose and rest and _MIN_SUMMARY_WORDS <= len(words) <= _MAX_SUMMARY_WORDS:
        entry = Entry(name, summary, signature, rest)
        if not _contains(entry.document.contents, summary):  # some summaries are just the dotted name
            yield entry


def split_docstring(docstring: str) -> tuple[str, str]:
    """Returns the first sentence of a docstring, on one line, and the rest, in which it does not occur again.

    The rest is empty where nothing but the summary, or no word at all, would remain.
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
    """Returns e.g. "minimize(fun, x0, args=())": no annotations, no self; of a class that of __init__."""
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


def _is_text(docstring: str) -> bool:
    return "\0" not in docstring and not _SURROGATE.search(docstring)


def _contains(text: str, words: str) -> bool:
    return f" {_normal(words)} " in f" {_normal(text)} "


def _normal(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))
