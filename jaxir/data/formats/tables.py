"""Reads records with named fields: JSONL, JSON arrays, TSV, CSV (all optionally gzipped) and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.installation import how_to_install
from jaxir.core.progress import progress
from jaxir.data.formats.json_arrays import holds_array, json_array
from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    decode_line,
    json_object,
    numbered_lines,
    parsed,
    raw_lines,
)
from jaxir.storage.files import local_path

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".tsv": "tsv",
    ".csv": "csv",
    ".parquet": "parquet",
}
_LONGEST_FIELD = 1 << 24  # maximum characters per CSV field; a longer field has an unclosed quote

T = TypeVar("T")


def parsed_rows(
    path: str | Path,
    parse: Callable[[dict[str, Any], int], T | None],
    on_bad_input: OnBadInput | Policy,
    *,
    columns: Collection[str] | None = None,
) -> Iterator[T]:
    """Like `parsed_lines`, but for a file with named columns: yields `parse(row, line)` for each row.

    Args:
      path: a CSV, TSV, JSONL or Parquet file, or a JSON array, recognised by its name. All but Parquet may be
        gzipped. The first row of CSV and TSV names the columns.
      parse: converts {column: value} and the row's first line (Parquet: the number of the row) to a record.
        Values of CSV and TSV are strings. It raises `MalformedRecord`, and returns None to leave a row out.
      on_bad_input: what to do with malformed rows.
      columns: the columns of a Parquet file to read, if present; None: all.

    Raises:
      UserError: the file does not exist, or its name has no known ending.
      BadInputError: the first malformed row ("stop"), or a file without a usable row.
    """
    yield from Table(path).parsed(parse, on_bad_input, columns)


class Table:
    """The records of one file with named fields.

    Attributes:
      path: the file.
      kind: "jsonl", "tsv", "csv" or "parquet", by the file's name. A "jsonl" file may hold one JSON array.
      columns: the names of the fields. A file without a header line has the columns "1", "2", ...
      numbered: whether the file has no header line.
    """

    def __init__(self, path: str | Path, *, numbered: bool = False):
        self.path = local_path(path)
        suffix = Path(self.path.name.removesuffix(".gz")).suffix.lower()
        if suffix not in KINDS:
            raise UserError(f"{path}: the name must end in one of {', '.join(KINDS)} (and may have .gz)")
        self.kind = KINDS[suffix]
        self.numbered = numbered and self.kind in ("tsv", "csv")
        self.columns = self._columns()

    def parsed(
        self,
        parse: Callable[[dict[str, Any], int], T | None],
        on_bad_input: OnBadInput | Policy,
        columns: Collection[str] | None = None,
    ) -> Iterator[T]:
        def parse_row(row: dict[str, Any] | MalformedRecord, number: int) -> T | None:
            if isinstance(row, MalformedRecord):
                raise row
            return parse(row, number)

        wanted = [name for name in self.columns if columns is None or name in columns]
        return parsed(self.path, self._rows(wanted), parse_row, on_bad_input)

    def _rows(self, columns: list[str]) -> Iterator[tuple[int, dict[str, Any] | MalformedRecord]]:
        if self.kind == "parquet":
            return self._parquet(columns)
        return self._json_lines() if self.kind == "jsonl" else self._separated()

    def _columns(self) -> list[str]:
        if self.kind == "parquet":
            return self._distinct(self._open_parquet().schema_arrow.names, None)
        if self.kind == "jsonl":
            lines = progress(self._json_lines(), what="looking for fields", unit="lines")
            columns = list(
                dict.fromkeys(key for _, parsed in lines if isinstance(parsed, dict) for key in parsed)
            )
            if not columns:
                next((self._raise(*line) for line in self._json_lines()), None)
            return columns
        number, first = next(self._fields(), (None, []))
        if isinstance(first, MalformedRecord):
            self._raise(number, first)
        if self.numbered:
            return [str(n) for n in range(1, len(first) + 1)]
        return self._distinct([name.strip() for name in first], number)

    def _distinct(self, names: list[str], number: int | None) -> list[str]:
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadInputError(self.path, number, f"two columns are called {twice!r}: rename one")
        return names

    def _raise(self, number: int | None, fault: Any) -> None:
        reason = (
            " ".join(filter(None, fault.args)) if isinstance(fault, MalformedRecord) else "it has no fields"
        )
        raise BadInputError(self.path, number, reason)

    def _json_lines(self) -> Iterator[tuple[int, dict[str, Any] | MalformedRecord]]:
        if holds_array(self.path):
            fault = MalformedRecord("an item of the array is not an object")
            for number, item in json_array(self.path):
                yield number, item if isinstance(item, dict) else fault
            return
        for number, raw in numbered_lines(self.path):
            try:
                yield number, json_object(decode_line(raw))
            except MalformedRecord as fault:
                yield number, fault

    def _separated(self) -> Iterator[tuple[int, dict[str, Any] | MalformedRecord]]:
        rows = self._fields()
        if not self.numbered:
            next(rows)
        width = len(self.columns)
        for number, row in rows:
            if isinstance(row, MalformedRecord):
                yield number, row
            elif len(row) != width:
                kind = f"expected {width} columns ({', '.join(self.columns)})"
                quoted = self.kind == "tsv" and any(field.startswith('"') for field in row)
                hint = "; TSV has no quotes: use a .csv for text with line ends" if quoted else ""
                yield number, MalformedRecord(kind, f"but found {len(row)}{hint}")
            else:
                yield number, dict(zip(self.columns, row, strict=True))

    def _fields(self) -> Iterator[tuple[int, list[str] | MalformedRecord]]:
        """Yields the first line number of each row and its fields."""
        if self.kind == "tsv":
            for number, raw in numbered_lines(self.path):
                try:
                    yield number, decode_line(raw).split("\t")
                except MalformedRecord as fault:
                    yield number, fault
            return
        csv.field_size_limit(_LONGEST_FIELD)
        # Invalid UTF-8 is reported per row below, because an error in this generator would end the reading.
        text = (line.decode("utf-8", errors="surrogateescape") for _, line in raw_lines(self.path))
        reader = csv.reader(text, strict=True)
        while True:
            number = reader.line_num + 1
            try:
                row = next(reader)
                for field in row:
                    decode_line(field.encode("utf-8", errors="surrogateescape"))
            except StopIteration:
                return
            except csv.Error as error:
                yield number, MalformedRecord("not valid CSV", f"({error})")
            except MalformedRecord as fault:
                yield number, fault
            else:
                if row:
                    yield number, row

    def _parquet(self, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        from pyarrow import ArrowException

        rows = 0
        try:
            for batch in self._open_parquet().iter_batches(batch_size=4096, columns=columns):
                yield from enumerate(batch.to_pylist(), rows + 1)
                rows += len(batch)
        except (ArrowException, OSError) as error:
            reason = f"damaged Parquet file ({' '.join(str(error).split())}); copy it again"
            raise BadInputError(self.path, rows + 1, reason) from error

    def _open_parquet(self) -> Any:
        try:
            from pyarrow import ArrowException, parquet
        except ModuleNotFoundError as error:
            raise UserError(
                f"{self.path}: pyarrow is needed to read Parquet: {how_to_install('parquet')}"
            ) from error
        try:
            return parquet.ParquetFile(self.path)
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except (ArrowException, OSError) as error:
            raise BadInputError(
                self.path, None, f"not a Parquet file ({' '.join(str(error).split())}); copy it again"
            ) from error
