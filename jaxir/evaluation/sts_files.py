"""Reads rated sentence pairs in the published file formats: STS 2012-2016, STS-B, SICK, and plain .tsv."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.lines import MalformedRecord, as_number, decode_line, parsed_lines, raw_lines
from jaxir.storage.files import local_path

HEADER = ["score", "sentence1", "sentence2"]
SETTINGS = ("all", "mean", "wmean")
SPLITS = {"trial": "dev", "test_annotated": "test"}  # SICK's names of splits
# Names of files with sentences, in SemEval and SentEval.
_YEAR = re.compile(r"STS(?:\d{4})?\.input\.(.+)\.txt")
_SPLIT = re.compile(r"(?:sts-|SICK_)?(train|dev|trial|test|test_annotated)")
EXPECTED = (
    "expected NAME.tsv (score, sentence1, sentence2); STS.input.NAME.txt with STS.gs.NAME.txt (STS 2012"
    " to 2016) or sts-train.csv, sts-dev.csv, sts-test.csv (STS-B), both at ixa2.si.ehu.eus/stswiki; or"
    " SICK_train.txt, SICK_trial.txt, SICK_test_annotated.txt (SICK: SemEval 2014, task 1)"
)


class SentencePair(NamedTuple):
    """Two sentences and a human score of their similarity."""

    score: float
    sentence1: str
    sentence2: str


Sets = dict[str, list[SentencePair]]


def read_sts(path: str | Path, split: str | None = None) -> Sets:
    """Reads a file of rated pairs, or all such files of a folder in the order of their names.

    Args:
      path: a file or folder. Files are .tsv, `score<TAB>sentence1<TAB>sentence2` with a header line, or the
        files of a year of SemEval, of the STS benchmark or of SICK, as in `EXPECTED`. SemEval's pairs without
        a score are left out.
      split: the split to read if a folder has train, dev and test; None: all splits.

    Returns:
      The pairs of each file, by its name without extension; for STS.input.NAME.txt by NAME.
    """
    path = local_path(path)
    if not path.is_dir() and not path.is_file():
        raise UserError(f"{path} is neither a folder nor a file of rated pairs: {EXPECTED}")
    sets, files = {}, {}
    for file in _files(path):
        if (reader := _reader(file)) is None:
            continue
        name, pairs_of = reader
        if name in files:
            both = f"{files[name].name} and {file.name}"
            raise UserError(f"{path}: the pairs of {both} are both called {name!r}; rename or remove one")
        if name in SETTINGS:
            raise UserError(f"{path}: {name!r} is the name of a summary of several files; rename that file")
        files[name], sets[name] = file, list(pairs_of())
        if len({p.score for p in sets[name]}) < 2:
            raise BadInputError(
                file,
                None,
                "all pairs have the same score, but a correlation needs two different ones; give other files",
            )
    if not sets:
        raise UserError(f"{path} has no rated pairs: {EXPECTED}")
    return sets if split is None or not path.is_dir() else _of_split(path, sets, split)


def read_sts_tasks(path: str | Path, split: str = "test") -> dict[str, Sets]:
    """Reads a folder with a folder for each task (a year of STS, STS-B or SICK), by `read_sts`.

    Returns {} if `path` itself contains rated pairs, or contains no folder with rated pairs.
    """
    return {folder.name: read_sts(folder, split) for folder in _tasks(local_path(path))}


def has_splits(path: str | Path) -> bool:
    """Returns whether the folder of tasks `path` has a task with several splits (train, dev, test)."""
    return any(map(_splits, map(_names, _tasks(local_path(path)))))


def _tasks(path: Path) -> list[Path]:
    """Returns the folders of tasks; [] if `path` itself contains rated pairs, or is not a folder."""
    if not path.is_dir() or _names(path):
        return []
    return [folder for folder in sorted(path.iterdir()) if folder.is_dir() and _names(folder)]


def _names(folder: Path) -> list[str]:
    return [reader[0] for file in _files(folder) if (reader := _reader(file)) is not None]


def _splits(names: Collection[str]) -> dict[str, str]:
    """Returns the split in each file name, such as "sts-dev" to "dev"; {} if any name has no split."""
    named = {name: match[1] for name in names if (match := _SPLIT.fullmatch(name))}
    return named if len(named) == len(names) else {}


def _of_split(folder: Path, sets: Sets, split: str) -> Sets:
    named = _splits(sets)
    if not named:
        return sets
    wanted = {name: sets[name] for name, word in named.items() if SPLITS.get(word, word) == split}
    if not wanted:
        raise UserError(f"{folder} has no split {split!r}, only {', '.join(sets)}")
    return wanted


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())


def _reader(file: Path) -> tuple[str, Callable[[], Iterator[SentencePair]]] | None:
    """Returns the name of a file's set of pairs, and a function that reads it; None for other files."""
    if year := _YEAR.fullmatch(file.name):
        return year[1], lambda: _year_pairs(file)
    if file.suffix == ".tsv":
        parse = _parse_tsv
    elif file.suffix == ".csv" and file.name.startswith("sts-"):
        parse = _parse_benchmark
    elif file.suffix == ".txt" and file.name.startswith("SICK"):
        parse = _parse_sick
    else:
        return None
    return file.stem, lambda: parsed_lines(file, parse, "stop")


def _year_pairs(file: Path) -> Iterator[SentencePair]:
    """Yields the pairs of STS.input.NAME.txt for which the same line of STS.gs.NAME.txt has a score."""
    gold = file.with_name(file.name.replace(".input.", ".gs."))
    if not gold.is_file():
        raise UserError(
            f"{file} needs its human scores in the same folder: {gold.name} is missing; copy it there"
        )
    lines = {number: raw.strip() for number, raw in raw_lines(gold)}
    scores = {number: raw for number, raw in lines.items() if raw}
    last = 0
    for last, raw in raw_lines(file):
        if last not in scores:
            continue
        try:
            score = scores[last].decode("ascii", "replace")
            yield _pair(score, *_columns(decode_line(raw.rstrip(b"\r\n")), 2)[:2])
        except MalformedRecord as fault:
            raise BadInputError(file, last, f"{fault.kind} {fault.detail}".rstrip()) from None
    # The last line of scores may be empty and without a line break, so one line less is accepted.
    if max(scores, default=0) > last or len(lines) < last - 1:
        raise BadInputError(
            gold, None, f"it has {len(lines)} lines, but {file.name} has {last}: check which is incomplete"
        )


def _parse_tsv(line: str, number: int) -> SentencePair | None:
    fields = [field.strip() for field in line.split("\t")]
    if number == 1:
        if [field.lower() for field in fields] != HEADER:
            raise MalformedRecord(f"the header must be {'<TAB>'.join(HEADER)}")
        return None
    if len(fields) != 3:
        raise MalformedRecord("expected 3 columns separated by tabs,", f"found {len(fields)}")
    return _pair(*fields)


def _parse_benchmark(line: str, number: int) -> SentencePair:
    """Parses a line of STS-B: genre, file, year, id, score, two sentences, and sometimes their sources."""
    return _pair(*_columns(line, 7)[4:7])


def _parse_sick(line: str, number: int) -> SentencePair | None:
    """Parses a line of SICK: pair_ID, sentence_A, sentence_B, relatedness_score, entailment_judgment."""
    fields = _columns(line, 4)
    if number == 1:
        if fields[1:4] != ["sentence_A", "sentence_B", "relatedness_score"]:
            raise MalformedRecord(
                "the header must begin with pair_ID<TAB>sentence_A<TAB>sentence_B<TAB>relatedness_score"
            )
        return None
    return _pair(fields[3], fields[1], fields[2])


def _columns(line: str, least: int) -> list[str]:
    fields = [field.strip() for field in line.split("\t")]
    if len(fields) < least:
        raise MalformedRecord(f"expected {least} columns or more separated by tabs,", f"found {len(fields)}")
    return fields


def _pair(score: str, sentence1: str, sentence2: str) -> SentencePair:
    if (number := as_number(score)) is None:
        raise MalformedRecord("the score is not a number:", repr(score))
    if not sentence1 or not sentence2:
        raise MalformedRecord("a sentence is empty")
    return SentencePair(number, sentence1, sentence2)
