"""Reads pairs from a file with named columns, whatever the names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxir.core.errors import BadInputError, UserError, suggest
from jaxir.data.formats.lines import MalformedRecord, OnBadInput, check_id, has_text, string_field
from jaxir.data.formats.sources import Document, PairExample, Query, folded, text_id
from jaxir.data.formats.tables import Table

# Usual names of columns, in upper or lower case. A `title` belongs to the passage; but if no column has a
# usual name for the query, `title` is the query, as in Stack Exchange's titles and bodies.
USUAL = {
    "query": ("query", "question", "anchor", "sentence1", "text1"),
    "passage": (
        *("passage", "positive", "answer", "context", "document", "pos", "positive_passages"),
        *("sentence2", "text2", "body", "text"),
    ),
    "negatives": ("negatives", "negative", "neg", "hard_negatives", "negative_passages"),
    "title": ("title",),
    "query_id": ("query_id", "query-id", "qid"),
    "passage_id": ("passage_id", "passage-id", "corpus-id", "pid", "docid", "doc_id"),
}


class PairColumns(NamedTuple):
    """The names of the columns that hold the fields; None means the one column with a usual name (`USUAL`).

    Attributes:
      query: column of the queries.
      passage: column of the passages: texts or, in JSONL and Parquet, lists of texts or of objects with
        `text` and, optionally, `title` and `docid`.
      negatives: column of irrelevant passages, in the same form; this column and the following ones are
          optional.
      title: column of the passages' titles.
      query_id: column of the queries' ids; without it, ids are hashes of the texts.
      passage_id: column of the passages' ids; without it, ids are hashes of the texts.
    """

    query: str | None = None
    passage: str | None = None
    negatives: str | None = None
    title: str | None = None
    query_id: str | None = None
    passage_id: str | None = None


class Pair(NamedTuple):
    query: Query
    passage: Document
    negatives: list[Document]

    @property
    def example(self) -> PairExample:
        negatives = tuple((n.id, n.contents) for n in self.negatives)
        return PairExample(*self.query, self.passage.id, self.passage.contents, negatives)


class PairTable:
    """The pairs of a JSONL, TSV, CSV (all optionally gzipped) or Parquet file.

    TSV and CSV files have a header line, unless the columns are given by number ("1", "2"). Quotes in a TSV
    file are ordinary characters. `prefix` is put before field names in errors: "--" if they are flags.

    Attributes:
      path: the file.
      columns: the column of each field of `PairColumns` that has one.
      unused: the columns that are not read.
    """

    def __init__(self, path: str | Path, columns: PairColumns, *, prefix: str = ""):
        named = {k: v for k, v in columns._asdict().items() if v is not None}
        self._table = Table(path, numbered=bool(named) and all(name.isdigit() for name in named.values()))
        self.path = self._table.path
        plain = ""
        if self._table.kind in ("tsv", "csv"):
            plain = f' (for a file without a header line: {prefix}query="1" {prefix}passage="2")'
        self.columns = find_columns(self.path, self._table.columns, named, prefix, plain)
        self._ids = Ids()
        self.unused = [c for c in self._table.columns if c not in self.columns.values()]

    def pairs(self, on_bad_input: OnBadInput) -> Iterator[Pair]:
        """Yields the pairs, with texts stripped; reading again yields the same pairs.

        Equal texts get the same id, the first in the file. Pairs without a query or a passage, repeated
        pairs, and pairs whose passage equals the query are left out and counted. A pair repeated with other
        negatives (triplets) is yielded again with the new negatives.
        """

        def parse(row: Mapping[str, Any], line: int) -> tuple[int, Query, list[Document], list[Document]]:
            query, passages, negatives = self._parse(row, line)
            if self._table.numbered and line == 1:
                check_no_header(query.text, passages[0].text)
            return line, query, passages, negatives

        seen: set[int] = set()
        rows = self._table.parsed(parse, on_bad_input, self.columns.values())
        for line, query, passages, negatives in rows:
            for passage in passages or [Document("", "", "")]:
                pair = hash((query.text, passage.contents))
                if not has_text(query.text):
                    on_bad_input.leave_out(self.path, line, "without a query")
                elif not has_text(passage.contents):
                    on_bad_input.leave_out(self.path, line, "without a passage")
                elif passage.contents == query.text:
                    on_bad_input.leave_out(self.path, line, "the passage is the query")
                else:
                    new = [n for n in negatives if hash((pair, n.contents)) not in seen]
                    if pair in seen and not new:
                        on_bad_input.leave_out(self.path, line, "a pair seen before")
                        continue
                    seen.update([pair, *(hash((pair, n.contents)) for n in new)])
                    yield Pair(query, passage, new)
        if not seen:
            raise BadInputError(self.path, None, "the file has no usable record; correct it, or give another")

    def _parse(self, record: Mapping[str, Any], line: int) -> tuple[Query, list[Document], list[Document]]:
        def field(name: str) -> str:
            return string_field(record, self.columns[name], "").strip() if name in self.columns else ""

        text = field("query")
        query = Query(self._ids.of("query", _id(record, self.columns.get("query_id")), text, line), text)
        passages = _passages(record, self.columns["passage"])
        title, identifier = field("title"), _id(record, self.columns.get("passage_id"))
        if (title or identifier) and len(passages) > 1:
            raise MalformedRecord("several passages", "in a record with one title or passage id")
        if title or identifier:
            passages = [Document(identifier or p.id, title or p.title, p.text) for p in passages]
        negatives = _passages(record, self.columns.get("negatives"))
        positive = {text for p in passages for text in (p.contents, p.text)}
        return (
            query,
            [self._with_id(p, line) for p in passages],
            [
                self._with_id(n, line)
                for n in negatives
                if has_text(n.contents) and n.contents not in positive
            ],
        )

    def _with_id(self, passage: Document, line: int) -> Document:
        return passage._replace(id=self._ids.of("passage", passage.id, passage.contents, line))


def check_no_header(query: str, passage: str) -> None:
    """Raises MalformedRecord if the first pair of a file read without a header line has column names."""
    usual = {name for names in USUAL.values() for name in names}
    if usual.issuperset((query.casefold(), passage.casefold())):
        detail = f"({query}, {passage}): remove that line"
        raise MalformedRecord("column names instead of the first pair", detail)


class Ids:
    """Assigns one id to each text of a file; raises MalformedRecord for an id with two texts."""

    def __init__(self) -> None:
        # (kind, id) -> hash and first line of the text.
        self._text_of: dict[tuple[str, str], tuple[int, int]] = {}
        self._id_of: dict[tuple[str, int], str] = {}

    def of(self, kind: str, identifier: str, text: str, line: int) -> str:
        """Returns the first id given for a text, else the text's hash. An `identifier` "" means no id."""
        key = (kind, hash(text))
        if identifier:
            self._id_of.setdefault(key, self.given(kind, identifier, text, line))
        return self._id_of.get(key) or text_id(text)

    def given(self, kind: str, identifier: str | None, text: str, line: int) -> str:
        """Returns `identifier`, or the text's hash if `identifier` is None."""
        if identifier is None:
            return text_id(text)
        if not identifier:
            raise MalformedRecord(f"empty {kind} id")
        known, first = self._text_of.setdefault((kind, identifier), (hash(text), line))
        if known != hash(text):
            detail = f"{identifier!r} (another text on line {first:,})"
            raise MalformedRecord(f"{kind} id has two different texts:", detail)
        return identifier


class Positives:
    """Hashes of all (query, passage) pairs, because one record's negative may be relevant in another.

    Texts are compared ignoring case and repeated white space.
    """

    def __init__(self) -> None:
        self._pairs: set[int] = set()
        self._left_out = 0

    def add(self, pair: Pair) -> None:
        self._pairs.add(_words(pair.query.text, pair.passage.contents))

    def without(self, pair: Pair) -> Pair:
        """Returns the pair without negatives that are relevant to its query; counts the dropped negatives."""
        kept = [n for n in pair.negatives if _words(pair.query.text, n.contents) not in self._pairs]
        self._left_out += len(pair.negatives) - len(kept)
        return pair._replace(negatives=kept)

    def report(self, path: Path) -> None:
        if self._left_out:
            print(
                f"{path}: {self._left_out:,} negatives left out, because another record has them as relevant"
                " passages of the same query",
                file=sys.stderr,
            )


def _words(*texts: str) -> int:
    return hash(tuple(map(folded, texts)))


def find_columns(
    where: str | Path, columns: Sequence[str], named: Mapping[str, str], prefix: str = "", plain: str = ""
) -> dict[str, str]:
    """Returns the column of each field of `PairColumns` that has one, from the `named` columns and the usual
    names.

    Raises a UserError if a named column does not exist, or not exactly one column can be the query or the
    passage; `where` names the data, `prefix` is put before field names, `plain` ends the sentence.
    """
    listed = ", ".join(f"{c:.40}" for c in columns[:20]) or "none"
    if len(columns) == 1 and ";" in columns[0]:
        plain = ". Its separator seems to be a semicolon: a .csv must have commas, a .tsv tabs"
    for name, column in named.items():
        if column not in columns:
            raise UserError(
                f"{where} has no column {column!r}, which {prefix}{name} names; it has: {listed}"
                f"{suggest(column, columns) or plain}"
            )
    free = {c.casefold(): c for c in columns if c not in named.values()}
    found = dict(named)
    for name in ("query", "passage"):
        usual = [free[u] for u in USUAL[name] if u in free]
        if name == "query" and not usual and "title" in free:
            usual = [free["title"]]
        if name in named:
            continue
        if len(usual) > 1:
            raise UserError(
                f"{where}: several columns could be the {name}: {', '.join(usual)} (of {listed}); choose"
                f" one with {prefix}{name}=COLUMN"
            )
        if not usual:
            raise UserError(
                f"{where}: no column has a usual name for the {name}: choose one with"
                f" {prefix}{name}=COLUMN; the file has: {listed}{plain}"
            )
        found[name] = usual[0]
    for name in ("negatives", "title", "query_id", "passage_id"):
        usual = [free[u] for u in USUAL[name] if u in free and free[u] not in found.values()]
        if name not in named and usual:
            found[name] = usual[0]
    return found


def _passages(record: Mapping[str, Any], column: str | None) -> list[Document]:
    """Returns the passages of a field (a text, an object, or a list of these); their ids may be ""."""
    value = record.get(column) if column else None
    return [_passage(item, column) for item in (value if isinstance(value, list) else [value])]


def _passage(item: Any, column: str | None) -> Document:
    if isinstance(item, dict):
        title, text = (string_field(item, name, "").strip() for name in ("title", "text"))
        return Document(_id(item, "docid"), title, text)
    return Document("", "", string_field({column: item}, column, "").strip())


def _id(record: Mapping[str, Any], column: str | None) -> str:
    """Returns the id in a column, converted to a string if it is a whole number; "" if there is no id."""
    value = record.get(column) if column else None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    identifier = string_field(record, column, "").strip() if column else ""
    return identifier and check_id(identifier)


def named_columns(columns: Mapping[str, str], order: Sequence[str] = tuple(USUAL)) -> str:
    """Returns e.g. "query = question, passage = answer"."""
    return ", ".join(f"{name} = {columns[name]}" for name in order if name in columns)
