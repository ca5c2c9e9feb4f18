"""Training data from the documentation of the installed Python packages, which needs no download.

For each documented public function, class and module, the query is the summary line of the docstring. The
passage is the name, the signature and the rest of the docstring. Sources are parsed, never imported.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import os
import pickle
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jaxir.core.errors import UserError, suggest
from jaxir.core.progress import progress
from jaxir.data.formats.collection_files import write_collection
from jaxir.data.formats.qrels import Qrel
from jaxir.data.formats.sources import PairExample
from jaxir.data.sets import docstrings
from jaxir.data.sets.docstrings import SPLITS, Entry, normal
from jaxir.storage.files import atomic_directory

# Skip jaxir itself, and packaging tools and tests, which differ from machine to machine.
_SKIPPED_PACKAGES = frozenset(
    {"jaxir", "pip", "setuptools", "pkg_resources", "wheel", "_distutils_hack", "idlelib", "lib2to3"}
    | {"turtledemo", "ensurepip", "test"}
)
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "_tests", "site-packages", "dist-packages", "__pycache__", "third_party"}
    | {"vendor", "_vendor", "vendored", "_vendored", "_vendored_packages", "extern", "externals"}
)
# Skip tests, generated code, and the models of transformers, whose docstrings are copies of each other.
_SKIPPED_FILE = re.compile(r"(test_.*|.*_test|.*_tests|conftest|gen_.*|.*_gen|.*_generated|.*_pb2)\.py")
_SKIPPED_MODULE = re.compile(r"transformers\.models\..*|pydoc_data\.topics")

FEWEST = 500  # use several processes from this many files on; one process reads 200 files a second
MOST = 16  # maximum number of processes
_CHILD = "from jaxir.data.sets import package_docs; package_docs.work()"


def collect(roots: Iterable[Path] | None = None) -> list[Entry]:
    """Returns the entries of all packages under `roots` (default: this interpreter's), sorted by name.

    Entries are duplicates if their summaries, or the rests of their docstrings, have the same words. Only
    one duplicate is kept: from a test package, else from a dev package, else the first by name. So no
    held-out text is trained on.
    """
    return _collect(tuple(installed_roots() if roots is None else roots))


def installed_roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")))


def read_pairs(split: str) -> Iterator[PairExample]:
    if split not in SPLITS:
        raise UserError(f"pydocs has no split {split!r} (has: {', '.join(SPLITS)}){suggest(split, SPLITS)}")
    for entry in collect():
        if entry.split == split:
            query, document = entry.query, entry.document
            yield PairExample(query.id, query.text, document.id, document.contents)


def write_beir(output: str | Path, entries: list[Entry]) -> None:
    """Writes a BEIR folder of all entries with qrels/{train,dev,test}.tsv.

    Its subfolders dev/ and test/ are BEIR folders of only the held-out packages.
    """
    if not entries:
        raise UserError(
            "the installed packages have no documented function, class or module: install more packages"
        )
    with atomic_directory(output) as folder:
        _write_folder(folder, entries, SPLITS)
        for split in ("dev", "test"):
            (folder / split).mkdir()
            _write_folder(folder / split, [e for e in entries if e.split == split], [split])


def counts(entries: list[Entry]) -> dict[str, collections.Counter[str]]:
    return {s: collections.Counter(e.package for e in entries if e.split == s) for s in SPLITS}


def _write_folder(folder: Path, entries: list[Entry], splits: Iterable[str]) -> None:
    write_collection(
        folder,
        documents=(e.document for e in entries),
        queries=(e.query for e in entries),
        qrels={s: [Qrel(e.query.id, e.document.id, 1) for e in entries if e.split == s] for s in splits},
    )


@functools.lru_cache(maxsize=1)
def _collect(roots: tuple[Path, ...]) -> list[Entry]:
    files = sorted({(module, path) for root in roots for module, path in _modules(root)})
    found: list[Entry] = []
    for entries_of_file in progress(
        read_files(files), total=len(files), what="reading docstrings", unit="files"
    ):
        found.extend(entries_of_file)
    found.sort(key=lambda e: (SPLITS[::-1].index(e.split), e.name))
    seen: set[object] = set()
    kept = []
    for entry in found:
        marks = {entry.name, ("summary", normal(entry.summary)), ("rest", normal(entry.rest))}
        if not marks & seen:
            kept.append(entry)
        seen |= marks
    return sorted(kept)


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (dotted name, file) of the modules under `root`, except tests, generated code and tools."""
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


def read_files(files: Sequence[tuple[str, Path]]) -> Iterator[list[Entry]]:
    """Yields the entries of each of `files`, (dotted name, path), in order; uses several processes."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(available, MOST)
    if count == 1 or len(files) < FEWEST:
        for module, path in files:
            yield docstrings.entries(module, path)
        return
    with contextlib.ExitStack() as started:
        workers = []
        for number in range(count):
            with tempfile.TemporaryFile() as share:
                pickle.dump(files[number::count], share)
                share.seek(0)
                command = [sys.executable, "-c", _CHILD]
                worker = started.enter_context(
                    subprocess.Popen(command, stdin=share, stdout=subprocess.PIPE, process_group=0)
                )
            started.callback(worker.kill)
            workers.append(worker)
        for number in range(len(files)):
            worker = workers[number % count]
            try:
                yield pickle.load(worker.stdout)
            except EOFError:
                raise UserError(
                    f"the process that reads docstrings ended with status {worker.wait()}: run the same"
                    " command again"
                ) from None


def work() -> None:
    """Reads a list of files from stdin, which `read_files` wrote, and writes the entries of each to stdout.

    Ends at the next file after the parent process has ended. Only the parent receives a terminal's Ctrl-C.
    """
    files = pickle.load(sys.stdin.buffer)
    gc.disable()  # garbage collection takes a fifth of the time, and syntax trees have no cycles
    try:
        for module, path in files:
            pickle.dump(docstrings.entries(module, path), sys.stdout.buffer)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent has ended; a normal exit would print that stdout cannot be flushed
