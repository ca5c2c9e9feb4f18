"""Reads BEIR's data sets as TensorFlow Datasets prepares them: "beir/scifact", "beir/msmarco", ..."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    has_text,
    json_object,
    needed_text,
    string_field,
)
from jaxir.data.formats.qrels import Qrel
from jaxir.data.formats.sources import Document, PairExample, Query
from jaxir.data.sets.pair_sources import PairSource
from jaxir.data.sets.tfds_records import read_tfds


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsBeirPairs(PairSource):
    """The (query, relevant document) pairs of one split of a BEIR data set in TFDS.

    Attributes:
      name: "beir/" and one of TFDS's configurations, such as "beir/scifact".
      split: "train", "validation" or "test"; not every data set has all three.
      data_dir: TFDS's data directory; None: TFDS's default.
    """

    name: str
    split: str = "train"
    data_dir: str | None = None

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        def parse(record: dict[str, Any], number: int) -> PairExample | None:
            if record["score"] < 1:
                return None
            document = _document(record)
            if not has_text(document.contents):
                raise MalformedRecord("the relevant document has neither title nor text:", repr(document.id))
            return PairExample(*_query(record), document.id, document.contents)

        return read_tfds(self.name, self.split, self.data_dir, parse, on_bad_input)


class TfdsBeir:
    """A BEIR data set in TFDS: the splits "passage" and "query", and one for each split of judgements."""

    def __init__(self, name: str, data_dir: str | None, on_bad_input: OnBadInput | Policy = "stop"):
        self._where, self._on_bad_input = (name, data_dir), on_bad_input

    def documents(self) -> Iterator[Document]:
        return self._read("passage", _document)

    def queries(self) -> Iterator[Query]:
        return self._read("query", _query)

    def qrels(self, split: str) -> Iterator[Qrel]:
        return self._read(split, lambda r: Qrel(r["query_id"], r["passage_id"], int(r["score"])))

    def _read(self, split: str, parse: Any) -> Iterator[Any]:
        name, data_dir = self._where
        return read_tfds(name, split, data_dir, lambda record, _: parse(record), self._on_bad_input)


def _query(record: dict[str, Any]) -> Query:
    return Query(record["query_id"], needed_text(record, "query"))


def _document(record: dict[str, Any]) -> Document:
    metadata = json_object(record["passage_metadata"])
    return Document(record["passage_id"], string_field(metadata, "title", ""), record["passage"])
