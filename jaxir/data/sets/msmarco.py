"""Reads the files of MS MARCO passage ranking: collection.tsv, queries.SPLIT.tsv, qrels.SPLIT.tsv, triples.

The archive collectionandqueries.tar.gz holds the splits "train" and "dev.small" (the 6,980 queries that
papers report); qrels.dev.tsv and the triples of ids are separate downloads. `pair_sources.TsvPairs` reads
triples of *texts* (triples.train.small.tsv).
"""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import BadInputError, UserError, suggest
from jaxir.core.values import Count, checked
from jaxir.data.formats.lines import MalformedRecord, OddRecord, OnBadInput, Policy, has_text, parsed_lines
from jaxir.data.formats.qrels import Qrel, read_qrels
from jaxir.data.formats.sources import (
    Document,
    PairExample,
    Query,
    find_file,
    new_id,
    read_judged_pairs,
    splits_in,
)
from jaxir.data.sets.pair_sources import PairSource
from jaxir.storage.files import local_path


class MsMarcoFolder:
    """A folder with the downloaded files of MS MARCO, each optionally gzipped."""

    def __init__(self, directory: str | Path, on_bad_input: OnBadInput | Policy = "stop"):
        self.directory, self.on_bad_input = local_path(directory), on_bad_input
        self._collection = find_file(self.directory, "collection.tsv", "an MS MARCO folder")

    @property
    def splits(self) -> list[str]:
        """Names of the splits that have both queries and judgements."""
        queries, judged = (splits_in(self.directory, kind) for kind in ("queries.", "qrels."))
        return [split for split in queries if split in judged]

    def documents(self) -> Iterator[Document]:
        """Yields the passages, which have no titles."""
        return (Document(i, "", text) for i, text in read_texts(self._collection, self.on_bad_input))

    def queries(self, *splits: str) -> Iterator[Query]:
        """Yields the distinct queries of splits; raises BadInputError for a query id with two texts."""
        known: dict[str, str] = {}
        for path in [self._file("queries", split) for split in splits]:
            for identifier, text in read_texts(path, self.on_bad_input):
                if identifier not in known:
                    known[identifier] = text
                    yield Query(identifier, text)
                elif known[identifier] != text:
                    reason = f"query {identifier!r} has another text than in an earlier split"
                    raise BadInputError(path, None, reason)

    def qrels(self, split: str, **known_ids: Container[str] | None) -> Iterator[Qrel]:
        """Yields the judgements of `split`, checked against `query_ids` and `document_ids`, if given."""
        return read_qrels(self._file("qrels", split), self.on_bad_input, trec=True, **known_ids)

    def collection(
        self, splits: Sequence[str]
    ) -> tuple[Iterable[Document], Iterable[Query], dict[str, Iterator[Qrel]]]:
        """Returns the passages, the queries of `splits`, and the judgements of each split.

        Read them in this order: judgements are checked against the passages and queries already read.
        """
        documents, queries = _Noted(self.documents()), _Noted(self.queries(*splits))
        known = {"query_ids": queries, "document_ids": documents}
        return documents, queries, {split: self.qrels(split, **known) for split in splits}

    def pairs(self, split: str) -> Iterator[PairExample]:
        queries = functools.partial(self.queries, split)
        return read_judged_pairs(
            self._file("qrels", split), queries, self.documents, self.on_bad_input, trec=True
        )

    def triples(self, path: str | Path, split: str, max_negatives: int) -> Iterator[PairExample]:
        """Yields a pair with negatives for each series of lines with the same query and relevant passage.

        A line has the ids of a query, a relevant passage and an irrelevant passage, separated by tabs.
        """
        queries = {query.id: query.text for query in self.queries(split)}
        passages = {document.id: document.text for document in self.documents()}

        def parse(line: str, number: int) -> list[str]:
            ids = [column.strip() for column in line.split("\t")]
            if len(ids) != 3:
                expected = "expected 3 tab-separated ids (query, relevant passage, irrelevant passage)"
                raise MalformedRecord(expected, f"but found {len(ids)}")
            noted = "triples of queries or passages that the collection lacks, left out"
            if ids[0] not in queries:
                raise OddRecord("an unknown query", repr(ids[0]), noted=noted)
            if unknown := next((i for i in ids[1:] if i not in passages), None):
                raise OddRecord("an unknown passage", repr(unknown), noted=noted)
            return ids

        triples = parsed_lines(path, parse, self.on_bad_input)
        for (query, positive), run in itertools.groupby(triples, key=lambda ids: tuple(ids[:2])):
            negatives = tuple((ids[2], passages[ids[2]]) for ids in itertools.islice(run, max_negatives))
            yield PairExample(query, queries[query], positive, passages[positive], negatives)

    def _file(self, kind: str, split: str) -> Path:
        if split not in self.splits:
            known = ", ".join(self.splits) or "none"
            raise UserError(
                f"{self.directory} has no split {split!r} (has: {known}){suggest(split, self.splits)}"
            )
        return find_file(self.directory, f"{kind}.{split}.tsv", "an MS MARCO folder")


class _Noted:
    """An iterator over documents or queries that remembers a hash of each id, in 8 bytes."""

    def __init__(self, items: Iterator[Document] | Iterator[Query]):
        self._items, self._read = items, array.array("q")

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._read.append(hash(item.id))
            yield item

    @functools.cached_property
    def _hashes(self) -> np.ndarray:
        return np.sort(self._read)

    def __contains__(self, identifier: str) -> bool:
        wanted = hash(identifier)
        at = np.searchsorted(self._hashes, wanted)
        return at < len(self._hashes) and self._hashes[at] == wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class MsMarcoPairs(PairSource):
    """The relevant (query, passage) pairs of one split of MS MARCO.

    Attributes:
      directory: folder with the downloaded files.
      split: "train", "dev.small" or another split that has queries.SPLIT.tsv and qrels.SPLIT.tsv.
    """

    directory: str
    split: str = "train"

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        return MsMarcoFolder(self.directory, on_bad_input).pairs(self.split)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MsMarcoTriples(PairSource):
    """Pairs with hard negatives, from triples of ids such as qidpidtriples.train.full.2.tsv.gz.

    Consecutive lines with the same query and relevant passage become one pair. While the triples are read,
    memory holds the entire collection (about 5 GB).

    Attributes:
      directory: folder with the downloaded files.
      triples: the file of triples; a relative path starts at `directory`.
      split: the split with the triples' queries.
      max_negatives: maximum number of negatives per pair; the first ones are kept. The file has hundreds
        per pair.
    """

    directory: str
    triples: str = "qidpidtriples.train.full.2.tsv.gz"
    split: str = "train"
    max_negatives: Count = 32

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        folder = MsMarcoFolder(self.directory, on_bad_input)
        return folder.triples(folder.directory / self.triples, self.split, self.max_negatives)


def read_texts(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[tuple[str, str]]:
    """Yields (id, text) from lines of id<TAB>text: collection.tsv and queries.SPLIT.tsv."""
    seen: dict[str, int] = {}

    def parse(line: str, number: int) -> tuple[str, str]:
        identifier, tab, text = line.partition("\t")
        if not tab:
            raise MalformedRecord("expected id<TAB>text", "but the line has no tab")
        if not has_text(text := text.strip()):
            raise MalformedRecord("no text after the tab")
        return new_id(identifier.strip(), seen, text), text

    return parsed_lines(path, parse, on_bad_input)
