"""Writes collections of documents, queries and judgements as BEIR folders."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.data.formats.qrels import Qrel
from jaxir.data.formats.sources import Document, Query
from jaxir.storage.json_files import json_line


class Counts(NamedTuple):
    documents: int
    queries: int
    qrels: dict[str, int]


class CollectionWriter:
    """Writes a BEIR folder record by record into an existing empty folder. A context manager."""

    def __init__(self, folder: Path, splits: Iterable[str]):
        self._folder, self._splits = folder, list(splits)
        self._counts: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> CollectionWriter:
        (self._folder / "qrels").mkdir()
        names = ["corpus.jsonl", "queries.jsonl", *(f"qrels/{split}.tsv" for split in self._splits)]
        self._files = {name: (self._folder / name).open("w", encoding="utf-8") for name in names}
        for split in self._splits:
            self._files[f"qrels/{split}.tsv"].write("query-id\tcorpus-id\tscore\n")
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in self._files.values():
            file.close()

    def document(self, document: Document) -> None:
        self._record("corpus.jsonl", document)

    def query(self, query: Query, excluded: Sequence[str] = ()) -> None:
        """Writes a query; `excluded` are ids of documents that its results must not have."""
        self._record("queries.jsonl", query, {"excluded_ids": excluded} if excluded else {})

    def judge(self, split: str, qrel: Qrel) -> None:
        name = f"qrels/{split}.tsv"
        self._files[name].write(f"{qrel.query_id}\t{qrel.document_id}\t{qrel.score}\n")
        self._counts[name] += 1

    def counts(self) -> Counts:
        """Returns the numbers of records; raises UserError if a file of the folder would be empty."""
        for name in ("corpus.jsonl", "queries.jsonl"):
            if not self._counts[name]:
                raise UserError(f"the data have no records for {name}: give data with documents and queries")
        qrels = {split: self._counts[f"qrels/{split}.tsv"] for split in self._splits}
        if empty := next((split for split, count in qrels.items() if not count), None):
            raise UserError(f"split {empty!r} has no judgements: leave it out, or give data that have some")
        return Counts(self._counts["corpus.jsonl"], self._counts["queries.jsonl"], qrels)

    def _record(self, name: str, item: Document | Query, more: Mapping[str, object] | None = None) -> None:
        fields = {name: value for name, value in item._asdict().items() if value is not None}
        record = {"_id": fields.pop("id"), **fields, **(more or {})}
        self._files[name].write(json_line(record))
        self._counts[name] += 1


def write_collection(
    folder: Path,
    *,
    documents: Iterable[Document],
    queries: Iterable[Query],
    qrels: Mapping[str, Iterable[Qrel]],
    excluded: Mapping[str, Sequence[str]] | None = None,
) -> Counts:
    """Writes corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv into an existing empty `folder`.

    The iterables are read one after the other, in the order of the arguments. `excluded` maps a query's id to
    the ids of documents that its results must not have.
    """
    with CollectionWriter(folder, qrels) as writer:
        for document in progress(documents, what="writing corpus.jsonl", unit="lines"):
            writer.document(document)
        for query in progress(queries, what="writing queries.jsonl", unit="lines"):
            writer.query(query, (excluded or {}).get(query.id, ()))
        for split, judged in qrels.items():
            for qrel in judged:
                writer.judge(split, qrel)
        return writer.counts()
