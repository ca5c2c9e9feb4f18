"""The base of indexes whose vectors are in a database, such as Milvus, PostgreSQL or Qdrant.

A collection of the database maps row numbers to vectors. The index directory maps rows to ids.

An index directory from elsewhere may name any server. So jaxir only opens a database that the user named, in
the engine's environment variable or in the call that builds an index.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import Embeddings, VectorIndex, describe_vectors, normalize
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.ids import descending_ranks
from jaxir.retrieval.indexes.index_info import IndexInfo
from jaxir.storage.npy import read_npy, write_npy

IndexType = Literal["FLAT", "HNSW", "AUTOINDEX"]
ROWS = "rows.npy"
COLLECTION = "passages"


class Collection(Protocol):
    """An open connection to a collection (or table) of vectors by row number."""

    def close(self) -> None: ...

    def require_new(self) -> None:
        """Raises a UserError if the collection exists."""

    def open(self, dimension: int, mark: str | None) -> None:
        """Raises a UserError if the collection is missing, or its mark shows that another index made it."""

    def create(
        self, vectors: Sequence[np.ndarray], index_type: IndexType, *, cosine: bool, mark: str | None
    ) -> None:
        """Makes the collection of vectors (shards [n, D]) with rows 0, 1, ...; drops it after any error."""

    def insert(self, vectors: Sequence[np.ndarray], first_row: int, *, cosine: bool) -> None:
        """Adds vectors (shards [n, D]) with consecutive rows from `first_row` on."""

    def delete(self, rows: Sequence[int]) -> None: ...

    def delete_from(self, row: int) -> None:
        """Deletes all rows >= `row`."""

    def require_count(self, count: int) -> None:
        """Raises a UserError if the collection has another number of vectors."""

    def search(
        self, queries: np.ndarray, k: int, index_type: IndexType
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns rows (int64) and inner products (float32) of the k nearest vectors of each query [Q, D]."""

    def drop(self) -> None:
        """Drops the collection if it exists; ignores errors."""


class DatabaseIndex(VectorIndex):
    """Vectors in a collection of a database, compared by inner product (of vectors of length 1 for cosine).

    `add` and `delete` change the collection at once for all its users. Documents of equal score are in
    descending order of id. If documents tie for rank k, the database decides which of them it returns.

    Attributes:
      place: the environment variable that names the database that jaxir may open.
      secret: the environment variable with the password or key that is sent to `place`.
    """

    place: ClassVar[str]
    secret: ClassVar[str]

    def __init__(
        self,
        info: IndexInfo,
        ids: list[str],
        documents: Documents | None,
        rows: np.ndarray,
        *,
        shards: list[np.ndarray] | None = None,
    ):
        super().__init__(info, ids, documents)
        self._rows, self._ranks = rows, descending_ranks(ids)
        self._shards = shards  # vectors that are not yet in a collection
        self._collection: Collection | None = None
        self._counted = False

    @classmethod
    @abc.abstractmethod
    def _connect(cls, uri: str, collection: str, *, new: bool = False) -> Collection:
        """Returns a connection. Raises a UserError if the database cannot be reached.

        `new` allows making the files of an embedded database.
        """

    @classmethod
    def _described(
        cls,
        embeddings: Embeddings,
        ids: Sequence[str],
        *,
        uri: str,
        collection: str,
        index_type: IndexType,
        **facts: Any,
    ) -> tuple[IndexInfo, list[np.ndarray]]:
        """Returns the content of index.json, and the vectors' shards."""
        info, shards = describe_vectors(cls.engine, embeddings, ids, **facts)
        settings = {
            "uri": uri,
            "collection": collection,
            "index_type": index_type,
            "next_row": len(ids),
            "mark": secrets.token_hex(16),
        }
        return dataclasses.replace(info, settings=settings), shards

    @classmethod
    def _new(cls, embeddings: Embeddings, ids: Sequence[str], **how: Any) -> Self:
        """Returns an index whose vectors wait to be sent; takes the arguments of `_described`."""
        info, shards = cls._described(embeddings, ids, **how)
        index = cls(info, list(ids), None, np.arange(len(ids)), shards=shards)
        index._require_new()
        return index

    @classmethod
    def require_named(cls, uri: str) -> None:
        """Raises a UserError if the environment variable names a database other than `uri`, a new index's."""
        if is_named(cls.place, uri) is False:
            raise UserError(
                f"{cls.place} is {os.environ[cls.place]}, where {cls.secret} is sent, but --uri is {uri}:"
                " give both the same value"
            )

    def close(self) -> None:
        if self._collection is not None:
            self._collection.close()
            self._collection = None

    def save(self, directory: str | Path, *, corpus: str | Path | None = None) -> None:
        waiting = self._shards
        try:
            super().save(directory, corpus=corpus)
        except BaseException:
            if waiting is not None and self._shards is None and not self._inside:
                self._opened().drop()
                self.close()
                self._shards = waiting
            raise

    @property
    def _inside(self) -> bool:
        """Whether the database is embedded in the index directory."""
        return False

    def _at_settings(self, *, new: bool = False) -> Collection:
        return self._connect(self.info.settings["uri"], self.info.settings["collection"], new=new)

    def _require_new(self) -> None:
        collection = self._at_settings(new=True)
        try:
            collection.require_new()
        finally:
            collection.close()

    def _opened(self) -> Collection:
        """Returns the collection. The first call fills it, if its vectors were not sent, and opens it."""
        if self._collection is None:
            if self._shards is not None:
                self._fill(self._at_settings(new=True))
                self._shards = None
            collection = self._at_settings()
            collection.open(self.info.dimension, self.info.settings.get("mark"))
            self._collection = collection
        return self._collection

    def _fill(self, collection: Collection) -> None:
        """Makes the collection of the waiting vectors, and closes the connection."""
        settings, cosine = self.info.settings, self.info.similarity == "cosine"
        try:
            collection.create(self._shards, settings["index_type"], cosine=cosine, mark=settings.get("mark"))
        finally:
            collection.close()

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        scores = np.full([len(queries), k], -np.inf, np.float32)
        ids: list[list[str]] = []
        if not len(queries):
            return scores, ids
        collection = self._opened()
        # Check the count here, not in `_opened`, so that an interrupted update can be run again.
        if not self._counted:
            collection.require_count(self.info.count)
            self._counted = True
        found = collection.search(queries, k, self.info.settings["index_type"])
        for row, (rows, values) in enumerate(found):
            at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
            known = self._rows[at] == rows
            at, values = at[known], values[known]
            order = np.lexsort((self._ranks[at], -values))
            scores[row, : len(order)] = values[order]
            ids.append([self.ids[i] for i in at[order]])
        return scores, ids

    def _add(self, shards: list[np.ndarray], ids: list[str]) -> None:
        collection, first = self._changeable(), self.info.settings["next_row"]
        collection.delete_from(first)  # removes rows that an interrupted `add` left
        collection.insert(shards, first, cosine=self.info.similarity == "cosine")
        collection.require_count(len(self.ids) + len(ids))
        rows = np.concatenate([self._rows, np.arange(first, first + len(ids))])
        self._become(rows, self.ids + ids, first + len(ids))

    def _delete(self, ids: set[str]) -> None:
        gone = np.array([doc_id in ids for doc_id in self.ids])
        collection = self._changeable()
        collection.delete_from(self.info.settings["next_row"])
        collection.delete(self._rows[gone].tolist())
        collection.require_count(len(self.ids) - len(ids))
        kept = [doc_id for doc_id in self.ids if doc_id not in ids]
        self._become(self._rows[~gone], kept, self.info.settings["next_row"])

    def _become(self, rows: np.ndarray, ids: list[str], next_row: int) -> None:
        self.ids, self._rows, self._ranks = ids, rows, descending_ranks(ids)
        settings = self.info.settings | {"next_row": next_row}
        self.info = dataclasses.replace(self.info, settings=settings)

    def _changeable(self) -> Collection:
        return self._opened()

    def _save_engine(self, directory: Path) -> None:
        if not self._inside:
            self._opened()
        with (directory / ROWS).open("wb") as file:
            write_npy(file, [self._rows])

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> DatabaseIndex:
        index = cls(info, ids, documents, read_rows(directory, info))
        index.require_trusted(directory)
        index._opened()
        return index

    def require_trusted(self, directory: Path) -> None:
        """Raises a UserError if the database is outside the index directory and the user did not name it."""
        if not self._inside and not is_named(self.place, uri := self.info.settings["uri"]):
            raise UserError(
                f"the vectors of {directory} are in {uri}, which jaxir only opens if you name it: set"
                f" {self.place}={uri} if you trust this server or path"
            )


def read_rows(directory: Path, info: IndexInfo) -> np.ndarray:
    return np.array(read_npy(directory / ROWS, np.int64, (info.count,)))


def is_named(variable: str, place: str) -> bool | None:
    """Returns whether an environment variable names this server or path; None if it is not set."""
    named = os.environ.get(variable, "").strip()
    return _normalised(named) == _normalised(place) if named else None


def _normalised(place: str) -> str:
    return place.rstrip("/") if "://" in place else str(Path(place).absolute())


def check_name(name: str, longest: int) -> None:
    if not re.fullmatch(rf"[A-Za-z_]\w{{0,{longest - 1}}}", name, re.ASCII):
        raise UserError(
            f"--collection must have only letters, digits and _, not {name!r} (at most {longest} characters)"
        )


def rows_to_send(part: np.ndarray, *, cosine: bool) -> np.ndarray:
    """Returns vectors [n, D] as a collection stores them: float32, of length 1 for cosine."""
    part = np.asarray(part, np.float32)
    return normalize(part) if cosine else part
