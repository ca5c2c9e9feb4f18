"""Writes a JSON line for each text of a file, window by window; an interrupted run resumes.

Until all windows are complete, they are kept beside the output NAME, in the directory `.NAME.unfinished`:

    made.json             the input, the model and the settings
    outputs-00000.jsonl   the lines of a window of texts

Texts are batched within their window, so outputs do not depend on interruptions or on the number of
processes. The user's cache keeps `made.json` and the SHA-256 of a complete output, so that the same command,
run again, finds nothing to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxir.core.errors import UserError
from jaxir.core.installation import cache_directory
from jaxir.core.progress import progress
from jaxir.retrieval.encoding.unfinished import start_or_resume, unfinished_of
from jaxir.runtime.distributed import as_first, wait_for_all
from jaxir.storage.files import atomic_file, remove_tree
from jaxir.storage.json_files import json_line, read_json
from jaxir.storage.open_files import open_to_read, sha256_of
from jaxir.storage.outputs import alone

WINDOW = 1024  # number of texts; an interruption loses at most one window of each process
WINDOWS = "outputs-*.jsonl"

R = TypeVar("R")  # a record with an `id`
# Maps a function that yields numbered windows to the numbered lines of each window.
Remote = Callable[[Callable[[], Iterator[tuple[int, list[R]]]]], Iterator[tuple[int, list[dict[str, Any]]]]]


@dataclasses.dataclass
class OutputsReport:
    """Counts of texts, outputs, and texts without outputs; and whether the file was already complete."""

    texts: int = 0
    outputs: int = 0
    without: int = 0
    was_complete: bool = False

    def add(self, outputs: Collection[Any]) -> None:
        self.texts += 1
        self.outputs += len(outputs)
        self.without += not outputs

    def __str__(self) -> str:
        counts = f"{self.texts:,} texts, {self.outputs:,} outputs"
        return counts + (f"; nothing was written for {self.without:,} texts" if self.without else "")


def summary(output: str | Path, report: OutputsReport | None, more: str = "") -> str:
    """Returns the last line that a command prints; `more` follows the counts."""
    if report is not None and report.was_complete:
        return f"{output} is complete, nothing to do"
    return f"{output}: {report}{more}"


def write_windows(
    output: Path,
    made: Mapping[str, Any],
    records: Iterable[R],
    make: Callable[[Sequence[R], Callable[[int], None]], Iterable[Mapping[str, Any]]],
    *,
    count: int,
    what: str,
    window: int = WINDOW,
    field: str = "outputs",
    remote: Remote[R] | None = None,
) -> OutputsReport | None:
    """Writes a line {"_id", `field`, ...} for each record, in order; the file appears only when complete.

    After an interruption the same call resumes, with the same result. A complete output of the same settings
    is not changed. The processes of one run share the windows and need a common file system; the first
    process joins the windows.

    Args:
      made: all inputs and settings that the lines depend on; they must be equal when a run resumes.
      make: maps a window of records to the fields of its lines, including `field`. It calls its second
        argument with the number of finished records.
      field: the field whose items are counted, a list or an object.
      remote: makes the lines in other processes instead of `make`, in any order; it may read `records` more
        than once.

    Returns:
      The counts, in the first process; None in the others.
    """
    part, parts = jax.process_index(), jax.process_count()
    unfinished = unfinished_of(output)
    windows = [unfinished / f"outputs-{number:05d}.jsonl" for number in range(-(-count // window))]
    with alone(output) if part == 0 else contextlib.nullcontext():
        complete = part == 0 and _is_complete(output, made)
        if part == 0 and not complete:
            start_or_resume(output, made, WINDOWS)
        if as_first({"complete": complete})["complete"]:
            remove_tree(unfinished)  # left by a run that was killed during the removal
            return OutputsReport(was_complete=True) if part == 0 else None
        own = set(windows[part::parts])
        written = {path for path in own if path.exists()}
        texts = {path: min(window, count - n * window) for n, path in enumerate(windows)}
        with progress(
            total=sum(texts[path] for path in own),
            initial=sum(texts[path] for path in written),
            what=what + (f", part {part + 1} of {parts}" if parts > 1 else ""),
            unit="texts",
        ) as bar:

            def missing() -> Iterator[tuple[int, list[R]]]:
                remaining = iter(records)
                for number, path in enumerate(windows):
                    batch = list(itertools.islice(remaining, window))
                    if path in own - written:
                        yield number, batch

            def made_here() -> Iterator[tuple[int, Iterable[Mapping[str, Any]]]]:
                for number, batch in missing():
                    yield number, lines_of(batch, make(batch, bar.update))

            for number, lines in made_here() if remote is None else remote(missing):
                with atomic_file(windows[number]) as file:
                    for line in lines:
                        file.write(json_line(line))
                if remote is not None:
                    bar.update(len(lines))
        wait_for_all("outputs are made")
        return _finish(windows, made, output, field) if part == 0 else None


def lines_of(records: Sequence[Any], found: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for record, fields in zip(records, found, strict=True):
        yield {"_id": record.id, **fields}


def _is_complete(output: Path, made: Mapping[str, Any]) -> bool:
    """Returns whether the output is intact and was made with the same settings."""
    with contextlib.suppress(UserError, FileNotFoundError):  # either file is missing or damaged
        noted = read_json(_note_of(output), dict[str, Any])
        return noted.get("made") == dict(made) and noted.get("sha256") == sha256_of(output)
    return False


def _note_of(output: Path) -> Path:
    place = hashlib.sha256(os.fsencode(os.path.realpath(output))).hexdigest()[:32]
    return cache_directory() / "outputs" / f"{place}.json"


def _finish(windows: list[Path], made: Mapping[str, Any], output: Path, field: str) -> OutputsReport:
    """Joins the windows, and notes in the user's cache that the output is complete."""
    report, digest = OutputsReport(), hashlib.sha256()
    with atomic_file(output, "wb") as file:
        for window in windows:
            with open_to_read(window) as lines:
                for line in lines:
                    report.add(json.loads(line)[field])
                    digest.update(line)
                    file.write(line)
    with contextlib.suppress(OSError, UserError), atomic_file(_note_of(output)) as file:
        file.write(json_line({"made": made, "sha256": digest.hexdigest()}))
    remove_tree(windows[0].parent)
    return report
