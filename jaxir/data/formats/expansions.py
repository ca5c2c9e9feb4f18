"""Reads generated texts: queries generated for documents, contexts generated for questions.

Two formats are read:

- .jsonl[.gz] with `_id` and `outputs`, written by `jaxir.expand generate`, or with `id` and
  `predicted_queries`, as doc2query-T5 releases them; one file or several.
- Text files with an output on each line, in the order of the texts. In doc2query-T5's release for MS MARCO, a
  file has one output for every passage and is split into pieces (`sample000.txt000-1004000`). GAR has one
  line for every question, EAR several consecutive lines. Tabs separate several outputs on a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    collecting,
    decode_line,
    has_text,
    json_object,
    list_field,
    parsed_lines,
    raw_lines,
    string_field,
)
from jaxir.storage.files import local_path

JSONL, LINES = ".jsonl", ".txt"


def read_expansions(
    path: str | Path,
    ids: Sequence[str],
    *,
    lines_each: int = 1,
    on_bad_input: OnBadInput | Policy = "stop",
) -> Iterator[tuple[str, list[str]]]:
    """Yields (id, generated texts) in the order of the file; repeated texts are kept.

    Args:
      path: a file or a folder. In a folder, files with .jsonl in their names are read, else those with .txt.
        Files whose names agree up to .txt are the pieces of one file, ordered by name. A text's first output
        comes from the first file.
      ids: ids of all texts that have outputs, in their order.
      lines_each: number of consecutive lines for each text, in text files.
      on_bad_input: "stop" at the first malformed line, or "skip" its text and count it.

    Raises:
      BadInputError: a line is malformed or empty, or the outputs do not match the texts.
      UserError: the folder has no file of generated texts.
    """
    files = _files(local_path(path))
    with collecting(on_bad_input) as collector:
        if JSONL in files[0][0].name:
            yield from _of_records([piece for pieces in files for piece in pieces], ids, collector)
        else:
            yield from _of_lines(files, ids, lines_each, collector)


def _files(place: Path) -> list[list[Path]]:
    if not place.is_dir():
        return [[place]]
    names = [p.name for p in place.iterdir() if not p.name.startswith(".") and p.is_file()]
    names.sort(key=_by_numbers)
    for ending in (JSONL, LINES):
        if found := [name for name in names if ending in name]:
            pieces: dict[str, list[Path]] = {}
            for name in found:
                pieces.setdefault(name.partition(ending)[0], []).append(place / name)
            return list(pieces.values())
    raise UserError(f"{place} has no file of generated texts: expected {JSONL} or {LINES} in a file's name")


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that compares numbers in names by value."""
    # Parts with odd indices are the numbers, because re.split keeps the captured separators.
    return [(int(x), "") if i % 2 else (-1, x) for i, x in enumerate(re.split(r"([0-9]+)", name))]


def _of_records(
    paths: list[Path], ids: Sequence[str], collector: OnBadInput
) -> Iterator[tuple[str, list[str]]]:
    missing = dict.fromkeys(ids)
    known = frozenset(missing)

    def parse(line: str, number: int) -> tuple[str, list[str]]:
        record = json_object(line)
        identifier = string_field(record, "_id" if "_id" in record else "id")
        if identifier not in known:
            raise MalformedRecord("no text has the id", repr(identifier))
        if identifier not in missing:
            raise MalformedRecord("duplicate id", repr(identifier))
        outputs = _outputs(record)
        del missing[identifier]
        return identifier, outputs

    for path in paths:
        yield from parsed_lines(path, parse, collector)
    if missing and collector.policy == "stop":
        raise BadInputError(
            paths[-1].parent if len(paths) > 1 else paths[0],
            None,
            f"no outputs for {len(missing):,} of {len(known):,} texts (the first: {next(iter(missing))!r});"
            " generate outputs for all texts, or skip these with on_bad_input=skip",
        )


def _outputs(record: dict[str, Any]) -> list[str]:
    name = "predicted_queries" if "predicted_queries" in record else "outputs"
    if name not in record:
        raise MalformedRecord("no field 'outputs' or 'predicted_queries'")
    outputs = list_field(record, name)
    if not all(isinstance(text, str) and has_text(text) for text in outputs):
        raise MalformedRecord(f"an item of {name!r} is empty or not a string")
    for text in outputs:
        string_field({name: text}, name)  # raises for an unpaired surrogate, which is no valid Unicode
    return outputs


def _of_lines(
    files: list[list[Path]], ids: Sequence[str], lines_each: int, collector: OnBadInput
) -> Iterator[tuple[str, list[str]]]:
    readers = [_read_lines(pieces) for pieces in files]
    for identifier in ids:
        outputs: list[str] = []
        faults: list[tuple[Path, int, str, str]] = []
        for pieces, reader in zip(
            files, readers, strict=True
        ):  # advance in all files, even if one has a malformed line
            for _ in range(lines_each):
                place, found = next(reader, (None, None))
                if place is None:
                    raise _wrong_length(pieces, len(ids), lines_each)
                if isinstance(found, MalformedRecord):
                    faults.append((*place, found.kind, found.detail))
                else:
                    outputs += found
        if faults:
            collector.record(*faults[0])
        else:
            yield identifier, outputs
    for pieces, reader in zip(files, readers, strict=True):
        if next(reader, None) is not None:
            raise _wrong_length(pieces, len(ids), lines_each)


def _read_lines(pieces: list[Path]) -> Iterator[tuple[tuple[Path, int], list[str] | MalformedRecord]]:
    """Yields (path, line number) of each line of a file in pieces, and the line's outputs or fault."""
    for piece in pieces:
        for number, raw in raw_lines(piece):
            try:
                line = decode_line(raw)
                if number == 1 and piece == pieces[0] and line.lstrip().startswith('{"'):
                    reason = "a JSON object: rename the file to have .jsonl in its name"
                    raise BadInputError(piece, number, reason)
                outputs = [text.strip() for text in line.split("\t")]
                if not all(map(has_text, outputs)):
                    raise MalformedRecord("an empty line" if len(outputs) == 1 else "an empty column")
                yield (piece, number), outputs
            except MalformedRecord as fault:
                yield (piece, number), fault


def _wrong_length(pieces: list[Path], texts: int, lines_each: int) -> BadInputError:
    lines = sum(1 for piece in pieces for _ in raw_lines(piece))
    each = "a line" if lines_each == 1 else f"{lines_each} lines"
    return BadInputError(
        pieces[-1],
        None,
        f"the file has {lines:,} lines, but {texts:,} texts with {each} each have {texts * lines_each:,}:"
        " give the file that was generated for these texts",
    )
