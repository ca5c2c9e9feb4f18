"""A JSON line for each text of a file, made window by window, taken up again where a run stopped.

Until all are there they lie beside the output, in the directory `.NAME.unfinished`:

    made.json             what is made: the input, the model, the settings
    outputs-00000.jsonl   the lines of a window of texts

Texts are batched within their window, so that outputs do not depend on where a run was interrupted, nor on
how many processes share the windows.

The user's cache notes what a whole output is made of, as in `made.json`, and its SHA-256, by which the same
command knows that there is nothing to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from jaxir.core.errors import UserError
from jaxir.core.installation import cache_directory
from jaxir.core.progress import progress
from jaxir.retrieval.encoding.unfinished import take_up, unfinished_of
from jaxir.runtime.distributed import as_first, wait_for_all
from jaxir.storage.files import atomic_file, remove_tree
from jaxir.storage.json_files import read_json
from jaxir.storage.open_files import open_to_read, sha256_of
from jaxir.storage.outputs import alone

WINDOW = 1024  # texts, at most which a process loses by an interruption
WINDOWS = "outputs-*.jsonl"


class HasId(Protocol):
    """What a line is made for."""

    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=HasId)
# Takes what reads the windows with their numbers; yields those with the lines of each.
Elsewhere = Callable[
    [Callable[[], Iterator[tuple[int, list[R]]]]], Iterator[tuple[int, list[dict[str, Any]]]]
]


@dataclasses.dataclass
class OutputsReport:
    """What is in the file: counts.

    Attributes:
      texts: texts of the input.
      outputs: what was written for them.
      without: texts for which nothing was.
      was_complete: whether it was there already, made of the same.
    """

    texts: int = 0
    outputs: int = 0
    without: int = 0
    was_complete: bool = False

    def add(self, outputs: Sequence[Any]) -> None:
        """Counts a text with its outputs."""
        self.texts += 1
        self.outputs += len(outputs)
        self.without += not outputs

    def __str__(self) -> str:
        said = f"{self.texts:,} texts, {self.outputs:,} outputs"
        return said + (f"; nothing was written for {self.without:,} texts" if self.without else "")


def told(output: str | Path, report: OutputsReport | None, how: str = "") -> str:
    """Returns what a command says at its end; `how` follows the counts."""
    if report is not None and report.was_complete:
        return f"{output} is complete, nothing to do"
    return f"{output}: {report}{how}"


def write_windows(
    output: Path,
    made: Mapping[str, Any],
    records: Iterable[R],
    make: Callable[[Sequence[R], Callable[[int], None]], Iterable[Mapping[str, Any]]],
    *,
    count: int,
    what: str,
    window: int = WINDOW,
    elsewhere: Elsewhere[R] | None = None,
) -> OutputsReport | None:
    """Writes a line {"_id", "outputs", ...} for each record, in order; the file appears only when whole.

    Run again after an interruption it continues; the result is the same. One that is whole and made of the
    same is left as it is. Several processes of one run, which see the same files, each make their part of the
    windows; the first one puts them together.

    Args:
      made: what is made: all that the lines depend on, so that nothing else is taken up again.
      make: the fields of each of a window's lines, `outputs` (a list) among them; it tells how many are done.
      elsewhere: makes the lines in the place of `make`, in other processes, in whatever order; `records` are
        then read there, more than once.

    Returns:
      What is in the file, in the first process; None in the others.

    Raises:
      UserError: what was begun there is something else, or another run is writing it.
    """
    part, parts = jax.process_index(), jax.process_count()
    unfinished = unfinished_of(output)
    windows = [unfinished / f"outputs-{number:05d}.jsonl" for number in range(-(-count // window))]
    with alone(output) if part == 0 else contextlib.nullcontext():
        complete = part == 0 and _is_complete(output, made)
        if part == 0 and not complete:
            take_up(output, made, WINDOWS)
        if as_first({"complete": complete})["complete"]:
            remove_tree(unfinished)  # of a run that was killed while it removed it
            return OutputsReport(was_complete=True) if part == 0 else None
        own = set(windows[part::parts])
        there = {place for place in own if place.exists()}
        texts = {place: min(window, count - n * window) for n, place in enumerate(windows)}
        with progress(
            total=sum(texts[place] for place in own),
            initial=sum(texts[place] for place in there),
            what=what + (f", part {part + 1} of {parts}" if parts > 1 else ""),
            unit="texts",
        ) as bar:

            def missing() -> Iterator[tuple[int, list[R]]]:
                remaining = iter(records)
                for number, place in enumerate(windows):
                    batch = list(itertools.islice(remaining, window))
                    if place in own - there:
                        yield number, batch

            def made_here() -> Iterator[tuple[int, Iterable[Mapping[str, Any]]]]:
                for number, batch in missing():
                    yield number, lines_of(batch, make(batch, bar.update))

            for number, lines in made_here() if elsewhere is None else elsewhere(missing):
                with atomic_file(windows[number]) as file:
                    for line in lines:
                        file.write(_line(line))
                if elsewhere is not None:
                    bar.update(len(lines))
        wait_for_all("outputs are made")
        return _finish(windows, made, output) if part == 0 else None


def lines_of(records: Sequence[HasId], found: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields what stands in the line of each record."""
    for record, fields in zip(records, found, strict=True):
        yield {"_id": record.id, **fields}


def _is_complete(output: Path, made: Mapping[str, Any]) -> bool:
    """Tells whether the output is there, as it was written, and made of the same."""
    with contextlib.suppress(UserError, FileNotFoundError):  # one of the two is missing, or damaged
        noted = read_json(_note_of(output), dict[str, Any])
        return noted.get("made") == dict(made) and noted.get("sha256") == sha256_of(output)
    return False


def _note_of(output: Path) -> Path:
    """Returns the file of the user's cache that notes what a whole output is made of."""
    place = hashlib.sha256(os.fsencode(os.path.realpath(output))).hexdigest()[:32]
    return cache_directory() / "outputs" / f"{place}.json"


def _finish(windows: list[Path], made: Mapping[str, Any], output: Path) -> OutputsReport:
    """Puts the windows together, and notes what they are made of."""
    report, digest = OutputsReport(), hashlib.sha256()
    with atomic_file(output, "wb") as file:
        for window in windows:
            with open_to_read(window) as lines:
                for line in lines:
                    report.add(json.loads(line)["outputs"])
                    digest.update(line)
                    file.write(line)
    with contextlib.suppress(OSError, UserError), atomic_file(_note_of(output)) as file:
        file.write(_line({"made": made, "sha256": digest.hexdigest()}))
    remove_tree(windows[0].parent)
    return report


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
