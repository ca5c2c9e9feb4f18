"""Search by Milvus, embedded in this process (milvus-lite) or on a server."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import Embeddings, VectorIndex, describe_vectors
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.ids import descending_ranks
from jaxir.retrieval.indexes.index_info import IndexInfo
from jaxir.retrieval.indexes.milvus_collection import PLACE, TOKEN, IndexType, MilvusCollection, is_named
from jaxir.storage.npy import read_npy, write_npy
from jaxir.storage.temporary_outputs import temporary_directory

INSIDE = "milvus.db"  # the `uri` in index.json of an embedded Milvus in the index directory
ROWS = "rows.npy"
COLLECTION = "passages"


class MilvusIndex(VectorIndex):
    """Vectors in a Milvus collection, compared by inner product (of vectors of length 1 for cosine).

    Without `uri` the collection is in the index directory (in a temporary directory until it is saved). With
    `uri` the collection is there, and `add` and `delete` change it at once for all its users. Such an index
    is only loaded if the variable MILVUS_URI is the same URI: the directory may come from someone else.

    Documents of equal score are in descending order of id. If documents tie for rank k, Milvus decides which
    of them it returns.
    """

    engine = "milvus"
    # The directory may have files without a checksum, left by killed searches or older versions.
    changing = (f"{INSIDE}/LOCK",)
    growing = (INSIDE,)

    def __init__(
        self,
        info: IndexInfo,
        ids: list[str],
        documents: Documents | None,
        rows: np.ndarray,
        *,
        directory: Path | None = None,
        shards: list[np.ndarray] | None = None,
    ):
        super().__init__(info, ids, documents)
        self._rows, self._ranks = rows, descending_ranks(ids)
        self._directory = directory  # directory of an embedded collection
        self._own = False  # whether `_directory` is temporary
        self._shards = shards  # vectors that are not yet in a collection
        self._collection: MilvusCollection | None = None
        self._counted = False

    @classmethod
    def build(
        cls,
        embeddings: Embeddings,
        ids: Sequence[str],
        *,
        uri: str | Path | None = None,
        collection: str = COLLECTION,
        index_type: IndexType = "FLAT",
        **facts: Any,
    ) -> MilvusIndex:
        """Makes an index of vectors, which are sent to Milvus at `save` or at the first search.

        Args:
          embeddings: float32 vectors [N, D], an array or its shards.
          ids: N distinct ids.
          uri: a server (https://host:19530, with its token in the variable MILVUS_TOKEN) or the path of an
            embedded Milvus; None makes an embedded Milvus in the index directory.
          collection: the name of the collection to make.
          index_type: FLAT compares all vectors and is exact; HNSW and AUTOINDEX (Milvus's choice) are not.
          **facts: `similarity` ("cosine", the default, or "dot"), and the `model` and its `fingerprint`.

        Raises:
          UserError: ids and vectors do not match, vectors are not finite or too long, Milvus cannot be
            reached, the collection exists, MILVUS_URI names another one, or the token would cross a network
            in clear text (unless MILVUS_CLEARTEXT=1).
        """
        info, shards = describe_vectors(cls.engine, embeddings, ids, **facts)
        place = INSIDE if uri is None else str(uri)
        if uri is not None and "://" not in place:
            if re.fullmatch(r"[\w.-]+:\d+", place):
                raise UserError(f"write the Milvus server {place} as http://{place} or https://{place}")
            place = str(Path(place).absolute())
        elif "@" in place:
            raise UserError("--uri, which the index stores, must not contain a password: set MILVUS_TOKEN")
        if uri is not None and is_named(place) is False:
            raise UserError(
                f"{PLACE} is {os.environ[PLACE]}, where {TOKEN} is sent, but --uri is {place}: give both the"
                " same value"
            )
        settings = {
            "uri": place,
            "collection": collection,
            "index_type": index_type,
            "next_row": len(ids),
            "mark": secrets.token_hex(16),
        }
        info = dataclasses.replace(info, settings=settings)
        index = cls(info, list(ids), None, np.arange(len(ids)), shards=shards)
        if not index._inside:
            with index._new(index._where()) as existing:
                existing.require_new()
        return index

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
        return self.info.settings["uri"] == INSIDE

    def _where(self) -> str | Path:
        uri = self.info.settings["uri"]
        if self._inside:
            return self._directory / INSIDE
        return uri if "://" in uri else Path(uri)

    def _new(self, where: str | Path) -> contextlib.closing[MilvusCollection]:
        return contextlib.closing(MilvusCollection(where, self.info.settings["collection"], new=True))

    def _opened(self) -> MilvusCollection:
        """Returns the collection. The first call fills it, if its vectors were not sent, and opens it."""
        if self._collection is None:
            if self._shards is not None:
                if self._inside:
                    self._make_temporary()
                self._fill(self._where())
                self._shards = None
            collection = MilvusCollection(self._where(), self.info.settings["collection"])
            collection.open(self.info.dimension, self.info.settings.get("mark"))
            self._collection = collection
        return self._collection

    def _fill(self, where: str | Path) -> None:
        settings, cosine = self.info.settings, self.info.similarity == "cosine"
        with self._new(where) as collection:
            collection.create(self._shards, settings["index_type"], cosine=cosine, mark=settings.get("mark"))

    def _make_temporary(self) -> None:
        closing = contextlib.ExitStack()
        self._directory, self._own = closing.enter_context(temporary_directory()), True
        weakref.finalize(self, closing.close)

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        scores = np.full([len(queries), k], -np.inf, np.float32)
        ids: list[list[str]] = []
        if not len(queries):
            return scores, ids
        collection = self._opened()
        if not self._counted:  # not in `_opened`, so that an interrupted update can be run again
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
        collection.delete_from(first)  # rows of an interrupted `add`
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

    def _changeable(self) -> MilvusCollection:
        """Returns a collection to change; a collection in a saved index directory is copied first."""
        if self._inside and self._shards is None and not self._own:
            self.close()
            source = self._where()
            self._make_temporary()
            shutil.copytree(source, self._where())
        return self._opened()

    def _save_engine(self, directory: Path) -> None:
        if not self._inside:
            self._opened()
        elif self._shards is not None:
            self._fill(directory / INSIDE)
        else:
            self.close()
            shutil.copytree(self._where(), directory / INSIDE)
        with (directory / ROWS).open("wb") as file:
            write_npy(file, [self._rows])

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> MilvusIndex:
        rows = np.array(read_npy(directory / ROWS, np.int64, (info.count,)))
        index = cls(info, ids, documents, rows, directory=directory)
        if not index._inside and not is_named(uri := info.settings["uri"]):
            raise UserError(
                f"the vectors of {directory} are in {uri}, which jaxir only opens if you name it: set"
                f" {PLACE}={uri} if you trust this server or path"
            )
        index._opened()
        return index
