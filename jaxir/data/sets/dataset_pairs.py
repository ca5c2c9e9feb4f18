"""Pairs in objects of the package `datasets` (Hugging Face), in memory, on a disk or streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Record
from jaxir.core.values import fits
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.stream_dataset import StreamDataset
from jaxir.data.batches.text_data import TextData
from jaxir.data.formats.lines import MalformedRecord, OnBadInput, Policy, has_text, string_field
from jaxir.data.formats.pair_table import PairColumns, find_columns
from jaxir.data.formats.sources import PairExample, text_id
from jaxir.data.sets.pair_sources import PairSource
from jaxir.data.text.tokenizer import Tokenizer


class DatasetPairs(PairSource):
    """Pairs in the rows of a `datasets.Dataset`; the rows are read one by one. Made by `Pairs.of_dataset`."""

    def __init__(self, rows: Any, columns: dict[str, str]):
        self._rows, self._columns = rows, columns

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        return _examples(self._rows, self._columns, on_bad_input)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"DatasetPairs({len(self):,} rows, {_in_words(self._columns)})"


class StreamedPairs(TextData):
    """Pairs in a `datasets.IterableDataset`, of which only one batch is in memory. See `Pairs.of_dataset`."""

    def __init__(self, stream: Any, columns: dict[str, str], examples: int):
        self._stream, self._columns, self.num_examples = stream, columns, examples

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> Dataset:
        def records(epoch: int) -> Iterator[Record]:
            if hasattr(self._stream, "set_epoch"):
                self._stream.set_epoch(epoch)  # a shuffled stream has another order in each epoch
            found = _examples(self._stream, self._columns, on_bad_input)
            return (example.record() for example in found)

        return StreamDataset(features, tokenizer, records, self.num_examples)

    def __repr__(self) -> str:
        return f"StreamedPairs({self.num_examples:,} rows an epoch, {_in_words(self._columns)})"


def pairs_of_dataset(
    data: Any, columns: PairColumns, examples: int | None = None
) -> DatasetPairs | StreamedPairs:
    """Returns training data of an object of `datasets`; see `Pairs.of_dataset`."""
    names = getattr(data, "column_names", None)
    if isinstance(names, Mapping):
        one = next(iter(names))
        raise UserError(f"data has the splits {', '.join(names)}: give one, such as data[{one!r}]")
    if names is None and hasattr(data, "take") and (first := next(iter(data.take(1)), None)) is not None:
        names = list(first)  # take names from the first row, because a stream of files may have no schema
    if not names or not hasattr(data, "__iter__"):
        raise UserError(f"data must be a datasets.Dataset or IterableDataset with columns, not {data!r:.60}")
    named = {name: column for name, column in columns._asdict().items() if column is not None}
    found = find_columns("the dataset", list(names), named)
    if hasattr(data, "__len__"):
        if examples is not None:
            raise UserError("examples only applies to a stream: leave it out")
        return DatasetPairs(data, found)
    if examples is None:
        examples = _known_length(data)
    if examples is None or not fits(examples, int) or examples < 1:
        raise UserError(
            "the stream has no length: give examples=N, the number of rows in an epoch, at least 1"
        )
    return StreamedPairs(data, found, examples)


def _known_length(stream: Any) -> int | None:
    """Returns the number of rows that an unmodified stream's metadata name; None: unknown."""
    splits, split = getattr(stream.info, "splits", None), getattr(stream, "split", None)
    known = splits.get(str(split)) if splits and split is not None else None
    return known.num_examples if known is not None and known.num_examples else None


def _examples(
    rows: Any, columns: Mapping[str, str], on_bad_input: OnBadInput | Policy
) -> Iterator[PairExample]:
    policy = on_bad_input if isinstance(on_bad_input, OnBadInput) else OnBadInput(on_bad_input)
    for number, row in enumerate(rows):
        try:
            yield _example(row, columns)
        except MalformedRecord as fault:
            policy.record(f"row {number} of the dataset", None, fault.kind, fault.detail)


def _example(row: Mapping[str, Any], columns: Mapping[str, str]) -> PairExample:
    query, passage = (_text(row, columns[name]) for name in ("query", "passage"))
    if title := string_field(dict(row), columns["title"], "") if "title" in columns else "":
        passage = f"{title} {passage}"
    given = row.get(columns["negatives"]) if "negatives" in columns else None
    listed = given if isinstance(given, list) else [] if given is None else [given]
    for item in listed:
        if not isinstance(item, str) or not has_text(item):
            raise MalformedRecord("a negative is not a text:", f"{item!r:.40}")
    query_id = _id(row, columns.get("query_id"), query)
    passage_id = _id(row, columns.get("passage_id"), passage)
    return PairExample(query_id, query, passage_id, passage, tuple((text_id(t), t) for t in listed))


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not has_text(value):
        raise MalformedRecord(f"column {column!r} is not a text:", f"{value!r:.40}")
    return value


def _id(row: Mapping[str, Any], column: str | None, text: str) -> str:
    value = row.get(column) if column else None
    return text_id(text) if value is None else str(value)


def _in_words(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {column}" for name, column in columns.items())
