"""An index with several vectors per document; a document has the score of its best vector."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes import base_index
from jaxir.retrieval.indexes.base_index import Embeddings, VectorIndex, load_index
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.index_info import IndexInfo

INNER = "entries"  # subdirectory with the index of all entries (several vectors of a document)


class EntriesIndex(VectorIndex):
    """N documents, each with one or more vectors ("entries").

    A document has the score of its best entry: s(q, d) = max_j s(q, d_j). If a document has at most S
    entries, the best (k - 1) S + 1 entries include the best k documents. The best 2 k entries usually do, so
    they are searched first. Ids of entries sort like their documents', so ties have the usual order.

    Attributes:
      entries: the index of the entries, with ids made by `entry_ids`.
    """

    engine = "entries"

    def __init__(self, entries: VectorIndex, documents: Documents | None = None):
        if entries.changing or entries.growing:
            raise UserError(
                f"the {entries.engine} engine takes one vector per document: give --backend=exact or scann"
            )
        names = [document_of(entry) for entry in entries.ids]
        counts = collections.Counter(names)  # number of entries of each document, in the order of the entries
        self.entries, self._most = entries, max(counts.values())
        info = dataclasses.replace(
            entries.info,
            engine=self.engine,
            count=len(counts),
            settings={"most": self._most, "backend": entries.engine},
        )
        super().__init__(info, list(counts), documents)

    @classmethod
    def build(
        cls, embeddings: Embeddings, ids: Sequence[str], *, backend: str = "exact", **options: Any
    ) -> EntriesIndex:
        """Makes an index of vectors [M, D] (an array or shards); equal document ids must be adjacent."""
        return cls(base_index.engine(backend).build(embeddings, entry_ids(ids), **options))

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        scores = np.full((len(queries), k), -np.inf, np.float32)
        ids: list[list[str]] = [[] for _ in queries]
        unfinished = np.arange(len(queries))
        enough = min((k - 1) * self._most + 1, len(self.entries.ids))
        for width in sorted({min(2 * k, enough), enough}):
            values, found = self.entries._search(queries[unfinished], width)
            for query, row, entries in zip(unfinished, values, found, strict=True):
                best: dict[str, float] = {}
                for entry, score in zip(entries, row, strict=False):
                    best.setdefault(document_of(entry), score)  # a document's first entry is its best
                ids[query] = list(best)[:k]
                scores[query, : len(ids[query])] = list(best.values())[:k]
            unfinished = np.array([query for query in unfinished if len(ids[query]) < k], np.int64)
            if not len(unfinished):
                break
        return scores, ids

    def _save_engine(self, directory: Path) -> None:
        (directory / INNER).mkdir()
        self.entries.write_into(directory / INNER)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> EntriesIndex:
        return cls(load_index(directory / INNER), documents)

    def close(self) -> None:
        self.entries.close()


def entry_ids(ids: Sequence[str]) -> list[str]:
    """Returns an id for each entry: its document's id, a space, and its number within the document.

    Document ids contain no space (run files could not hold it) and no character that sorts before a space, so
    entries sort like their documents.
    """
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for document in ids:
        found.append(f"{document} {counts[document]}")
        counts[document] += 1
    return found


def document_of(entry: str) -> str:
    return entry.rpartition(" ")[0]
