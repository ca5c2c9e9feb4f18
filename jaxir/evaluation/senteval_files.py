"""Reads the files of SentEval's transfer tasks exactly as SentEval's own code does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.lines import MalformedRecord, numbered_lines, parsed_lines, raw_lines
from jaxir.storage.files import local_path

WHERE = (
    "the script data/downstream/get_transfer_data.bash of github.com/facebookresearch/SentEval downloads"
    " and tokenises these files"
)
QUESTIONS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")  # coarse labels of TREC's question types


class Row(NamedTuple):
    """A labelled example: one text, or two in MRPC, with single spaces between words."""

    texts: tuple[str, ...]
    label: int


Task = dict[str, list[Row]]  # the examples of each part: "all", or "train", "test" and maybe "dev"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The files of a transfer task of SentEval, and how each is read."""

    files: dict[str, tuple[str, Callable[[Path], Iterator[Row]]]]  # relative path to (part, reader)
    pairs: bool = False  # whether an example has two texts


def _binary(folder: str, positive: str, negative: str) -> Layout:
    """Returns the layout of a task of two files, one text per line: label 1 for `positive`, else 0."""
    return Layout(
        {
            f"{folder}/{name}": ("all", lambda path, label=label: _one_label(path, label))
            for name, label in ((positive, 1), (negative, 0))
        }
    )


def read_senteval(directory: str | Path) -> dict[str, Task]:
    """Reads the tasks in a folder that has all or some of the folders of SentEval's data/downstream."""
    directory = local_path(directory)
    found = {
        name: layout
        for name, layout in TASKS.items()
        if any((directory / file).is_file() for file in layout.files)
    }
    if not found:
        files = ", ".join(file for layout in TASKS.values() for file in layout.files)
        raise UserError(f"{directory} has none of SentEval's transfer tasks ({files}): {WHERE}")
    return {name: _read(directory, name, layout) for name, layout in found.items()}


def _read(directory: Path, name: str, layout: Layout) -> Task:
    task: Task = {}
    for file, (part, read) in layout.files.items():
        path = directory / file
        if not path.is_file():
            raise UserError(
                f"{name} needs {' and '.join(layout.files)} in {directory}, which lacks {file}: {WHERE}"
            )
        task.setdefault(part, []).extend(read(path))
    for part, rows in task.items():
        if len({row.label for row in rows}) < 2:
            raise UserError(f"{directory}: part {part!r} of {name} only has one label: download it again")
    return task


def _one_label(path: Path, label: int) -> Iterator[Row]:
    """Yields a row per line in Latin-1, also for empty lines. As in SentEval, not only \\n ends a line."""
    for number, raw in raw_lines(path):
        for text in _latin_1(path, number, raw).splitlines():
            yield Row((_words(text),), label)


def _latin_1(path: Path, number: int, raw: bytes) -> str:
    if b"\0" in raw:
        raise BadInputError(
            path, number, "the file contains a NUL byte, so it is not text; download it again"
        )
    return raw.decode("latin-1")


def _trec(path: Path) -> Iterator[Row]:
    """Yields TREC's questions, given as lines `COARSE:fine words of the question` in Latin-1."""
    for number, raw in numbered_lines(path):
        label, _, rest = _latin_1(path, number, raw).strip().partition(":")
        _, space, question = rest.partition(" ")
        if not space:
            raise BadInputError(path, number, "expected COARSE_LABEL:FINE_LABEL, a space, and a question")
        if label not in QUESTIONS:
            raise BadInputError(
                path,
                number,
                f"unknown label {label!r}, not one of {', '.join(QUESTIONS)}; download the file again",
            )
        yield Row((_words(question),), QUESTIONS.index(label))


def _mrpc(path: Path) -> Iterator[Row]:
    """Yields MRPC's pairs: tab-separated columns label, two ids and two sentences, after a header."""

    def parse(line: str, number: int) -> Row | None:
        if number == 1:
            return None
        fields = _columns(line, 5)
        return Row((_words(fields[3]), _words(fields[4])), _zero_or_one(fields[0]))

    return parsed_lines(path, parse, "stop")


def _sst(path: Path) -> Iterator[Row]:
    """Yields SST-2's sentences, given as lines `sentence<TAB>0` or `sentence<TAB>1`."""

    def parse(line: str, _: int) -> Row:
        text, label = _columns(line, 2)
        return Row((_words(text),), _zero_or_one(label))

    return parsed_lines(path, parse, "stop")


def _columns(line: str, count: int) -> list[str]:
    fields = line.strip().split("\t")
    if len(fields) != count:
        raise MalformedRecord(f"expected {count} columns separated by tabs, found {len(fields)}")
    return fields


def _zero_or_one(text: str) -> int:
    if text not in ("0", "1"):
        raise MalformedRecord(f"the label must be 0 or 1, not {text!r:.40}")
    return int(text)


def _words(text: str) -> str:
    return " ".join(text.split())


TASKS = {
    "MR": _binary("MR", "rt-polarity.pos", "rt-polarity.neg"),
    "CR": _binary("CR", "custrev.pos", "custrev.neg"),
    "SUBJ": _binary("SUBJ", "subj.objective", "subj.subjective"),
    "MPQA": _binary("MPQA", "mpqa.pos", "mpqa.neg"),
    "SST2": Layout({f"SST/binary/sentiment-{part}": (part, _sst) for part in ("train", "dev", "test")}),
    "TREC": Layout({"TREC/train_5500.label": ("train", _trec), "TREC/TREC_10.label": ("test", _trec)}),
    "MRPC": Layout(
        {f"MRPC/msr_paraphrase_{part}.txt": (part, _mrpc) for part in ("train", "test")}, pairs=True
    ),
}
