"""Reads text files with one record per line (.jsonl, .tsv, optionally gzipped); handles malformed records."""

from __future__ import annotations

import codecs
import collections
import contextlib
import gzip
import json
import math
import re
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxir.core.errors import BadInputError, UserError
from jaxir.storage.files import local_path
from jaxir.storage.open_files import open_to_read

S = TypeVar("S")
T = TypeVar("T")
_BLANK = {"Zs", "Zl", "Zp", "Cc", "Cf"}
_ONE_A_LINE = "put one object on each line (`jq -c '.[]' FILE` does so for an array)"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
Policy = Literal["stop", "skip"]


class MalformedRecord(Exception):
    """Raised by a parser, with the kind of fault (which is counted) and, optionally, its detail."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class OddRecord(MalformedRecord):
    """Raised by a parser for a record that published collections contain and trec_eval accepts.

    Such a record is counted and reported as `noted`, and `record`, if given, is used instead. The record is
    only malformed if the reader is strict.
    """

    def __init__(self, kind: str, detail: str, *, noted: str, record: Any = None):
        super().__init__(kind, detail)
        self.noted, self.record = noted, record


class OnBadInput:
    """What to do with malformed records: stop at the first, or skip, count and report them.

    Attributes:
      policy: "stop" or "skip".
      strict: whether a record that is odd but usable (`OddRecord`) is malformed.
      skipped: number of records skipped, by kind of fault.
      noted: number of records that are odd but no fault (an empty document), by kind.
    """

    def __init__(self, policy: Policy = "stop", *, strict: bool = False):
        if policy not in ("stop", "skip"):
            raise UserError(f"on_bad_input must be stop or skip, got {policy!r}")
        self.policy, self.strict = policy, strict
        self.skipped: collections.Counter[str] = collections.Counter()
        self.noted: collections.Counter[str] = collections.Counter()
        self._first: dict[str, str] = {}
        # Kind -> set of (PATH:LINE, detail) of odd records. It is a set, because some files are read several
        # times.
        self._odd: dict[str, set[tuple[str, str]]] = {}

    def record(self, path: str | Path, line: int | None, kind: str, detail: str = "") -> None:
        """Raises BadInputError ("stop"), or counts the record as skipped ("skip")."""
        if self.policy == "stop":
            raise BadInputError(path, line, " ".join(filter(None, [kind, detail])))
        self.skipped[kind] += 1
        self._first.setdefault(kind, f"{path}:{line}" if line is not None else f"{path}")

    def accept(self, path: str | Path, line: int | None, odd: OddRecord) -> None:
        """Counts a record that is odd but usable. If strict, treats it as malformed."""
        if self.strict:
            self.record(path, line, odd.kind, odd.detail)
            return
        place = str(path) if line is None else f"{path}:{line}"
        self._odd.setdefault(odd.noted, set()).add((place, odd.detail))
        self._first.setdefault(odd.noted, place)

    def note(self, path: str | Path, line: int, kind: str) -> None:
        self.noted[kind] += 1
        self._first.setdefault(kind, f"{path}:{line}")

    def leave_out(self, path: str | Path, line: int, kind: str) -> None:
        """Counts a well-formed record that is not used; raises nothing, whatever the policy."""
        self.skipped[kind] += 1
        self._first.setdefault(kind, f"{path}:{line}")

    def report(self, *, noted: str = "kept") -> None:
        """Prints to standard error what was skipped and noted, if anything, and resets the counts."""
        for what, counts in (("skipped", self.skipped), (noted, self.noted)):
            for kind, count in counts.most_common():
                records = "record" if count == 1 else "records"
                print(f"{what} {count:,} {records}: {kind} (first: {self._first[kind]})", file=sys.stderr)
            counts.clear()
        if self._odd:  # report all kinds of odd records on one line
            kinds = (f"{kind}: {len(at):,} (first: {self._first[kind]})" for kind, at in self._odd.items())
            print(f"note: {'; '.join(kinds)}", file=sys.stderr)
            self._odd.clear()


@contextlib.contextmanager
def collecting(on_bad_input: OnBadInput | Policy) -> Iterator[OnBadInput]:
    """Yields an `OnBadInput`; prints its report at the end if it was created here from a policy."""
    if isinstance(on_bad_input, OnBadInput):
        yield on_bad_input
        return
    collector = OnBadInput(on_bad_input)
    yield collector
    collector.report()


def raw_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yields (1-based line number, bytes with the line end) of each line of a file.

    Gzip is recognised by its first bytes, whatever the name. A byte order mark is dropped. An empty file or a
    damaged gzip stream is a BadInputError, which is never skipped.
    """
    number = 0
    try:
        with open_to_read(local_path(path)) as raw:
            stream = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
            for number, line in enumerate(stream, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadInputError(path, number + 1, f"damaged gzip stream ({error}); copy it again") from error
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"{path}: {error.strerror.lower()}") from error
    if number == 0:
        raise BadInputError(path, None, "the file is empty")


def numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yields (1-based line number, bytes without the line end) of each line that is not blank."""
    for number, line in raw_lines(path):
        line = line.rstrip(b"\r\n")
        if line and not line.isspace():
            yield number, line


def parsed_lines(
    path: str | Path, parse: Callable[[str, int], T | None], on_bad_input: OnBadInput | Policy
) -> Iterator[T]:
    """Yields the records `parse(line, number)` of the lines that are not blank, leaving out None (a header).

    If `on_bad_input` is a policy, not an `OnBadInput`, prints what was skipped at the end of the file.

    Raises:
      BadInputError: the first malformed line ("stop"), or a file without a usable line.
    """

    def parse_raw(raw: bytes, number: int) -> T | None:
        return parse(decode_line(raw), number)

    return parsed(path, numbered_lines(path), parse_raw, on_bad_input)


def parsed(
    path: str | Path,
    numbered: Iterable[tuple[int, S]],
    parse: Callable[[S, int], T | None],
    on_bad_input: OnBadInput | Policy,
) -> Iterator[T]:
    usable = False
    with collecting(on_bad_input) as collector:
        for number, item in numbered:
            try:
                record = parse(item, number)
            except OddRecord as odd:
                collector.accept(path, number, odd)
                record = None if collector.strict else odd.record
            except MalformedRecord as fault:
                collector.record(path, number, fault.kind, fault.detail)
                continue
            if record is not None:
                usable = True
                yield record
        if not usable:
            raise BadInputError(path, None, "the file has no usable record; correct it, or give another")


def json_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = f"; {_ONE_A_LINE}" if line.strip() in ("[", "{", "[{") else ""
        raise MalformedRecord("not valid JSON", f"({error}){hint}") from error
    if not isinstance(value, dict):
        hint = f": {_ONE_A_LINE}" if isinstance(value, list) else ""
        raise MalformedRecord("not a JSON object", f"but {_json_type(value)}{hint}")
    return value


_REQUIRED = object()


def string_field(record: dict[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    """Returns the string `record[name]`, or `default` (if given) when the field is absent or null."""
    value = record.get(name)
    if value is None and (default is not _REQUIRED):
        return default
    if name not in record:
        present = ", ".join(map(repr, record)) or "none"
        raise MalformedRecord(f"no field {name!r}", f"(it has {present:.200})")
    if not isinstance(value, str):
        raise MalformedRecord(f"field {name!r} is not a string", f"but {_json_type(value)}")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise MalformedRecord(f"field {name!r} holds half of a surrogate pair, which is not Unicode text")
    return value


def needed_text(record: dict[str, Any], name: str) -> str:
    """Returns the string `record[name]`, which must not be blank."""
    text = string_field(record, name)
    if not has_text(text):
        raise MalformedRecord(f"field {name!r} is empty")
    return text


def has_text(text: str) -> bool:
    """Whether `text` has more than white space and control characters, which tokenizers drop."""
    return any(unicodedata.category(character) not in _BLANK for character in text)


def bad_sign(identifier: str) -> str | None:
    """Returns the name of the first character that an id must not have, such as "U+2003 EM SPACE", else None.

    Ids must not have control characters, or white space, which separates columns of run files. Characters
    such as U+200C ZERO WIDTH NON-JOINER are allowed: they are part of words in some scripts, and of emoji.
    """
    for character in identifier:
        if character.isspace() or unicodedata.category(character) == "Cc":
            return f"U+{ord(character):04X} {unicodedata.name(character, 'CONTROL CHARACTER')}"
    return None


def check_id(identifier: str) -> str:
    if not identifier:
        raise MalformedRecord("empty id")
    if sign := bad_sign(identifier):
        what = "white space or a control character in an id, which run files cannot hold:"
        raise MalformedRecord(what, f"{identifier!r} has {sign}")
    return identifier


def list_field(record: dict[str, Any], name: str) -> list[Any]:
    """Returns the list `record[name]`, or an empty list when the field is absent or null."""
    value = record.get(name)
    if value is not None and not isinstance(value, list):
        raise MalformedRecord(f"field {name!r} is not a list", f"but {_json_type(value)}")
    return value or []


def as_object(item: Any, field: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise MalformedRecord(f"an item of {field!r} is not an object:", f"{item!r:.40}")
    return item


def as_integer(text: str) -> int | None:
    """Returns the whole number that `text` spells, or None, as for "1_0", "1.0" and a number of 19 digits."""
    return int(text) if _INTEGER.fullmatch(text) else None


def as_grade(text: str) -> int | None:
    """Returns the whole number that a grade spells, also as a decimal (1.0) like some tools; else None."""
    number = as_number(text)
    return int(number) if number is not None and number.is_integer() and abs(number) < 1e18 else None


def as_number(text: str) -> float | None:
    """Returns the finite number that `text` spells, or None, as for "nan", "inf", "1_0" and "1e999"."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else None


def decode_line(raw: bytes) -> str:
    if b"\0" in raw:
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise MalformedRecord("not UTF-8", "but UTF-16; iconv -f UTF-16 -t utf8 converts it")
        raise MalformedRecord("NUL byte", f"at byte {raw.index(0) + 1} of the line: it must be a text file")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedRecord(
            "not UTF-8",
            f"(byte 0x{raw[error.start]:02x} at {error.start + 1}); iconv -f ENCODING -t utf8 converts it",
        ) from error


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    known = names.get(type(value)) or ("a number" if isinstance(value, int | float) else None)
    return known or type(value).__name__  # Parquet has more types than JSON, such as bytes and datetime
