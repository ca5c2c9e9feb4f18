"""Search by Milvus, embedded in this process (milvus-lite) or on a server."""

from __future__ import annotations

import contextlib
import re
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import Embeddings
from jaxir.retrieval.indexes.database_index import COLLECTION, DatabaseIndex, IndexType, read_rows
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.index_info import IndexInfo
from jaxir.retrieval.indexes.milvus_collection import PLACE, TOKEN, MilvusCollection
from jaxir.storage.temporary_outputs import temporary_directory

INSIDE = "milvus.db"  # the `uri` in index.json of an embedded Milvus in the index directory


class MilvusIndex(DatabaseIndex):
    """Vectors in a Milvus collection, compared by inner product (of vectors of length 1 for cosine).

    Without `uri` the collection is in the index directory (in a temporary directory until it is saved). With
    `uri` the collection is in that database, and `add` and `delete` change it at once for all its users. Such
    an index is only loaded if the variable MILVUS_URI is the same URI: the directory may come from someone
    else.

    Documents of equal score are in descending order of id. If documents tie for rank k, Milvus decides which
    of them it returns.
    """

    engine = "milvus"
    place, secret = PLACE, TOKEN
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
        super().__init__(info, ids, documents, rows, shards=shards)
        self._directory = directory  # directory of an embedded collection
        self._own = False  # whether `_directory` is temporary

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
        place = INSIDE if uri is None else str(uri)
        if uri is not None and "://" not in place:
            if re.fullmatch(r"[\w.-]+:\d+", place):
                raise UserError(f"write the Milvus server {place} as http://{place} or https://{place}")
            place = str(Path(place).absolute())
        elif "@" in place:
            raise UserError("--uri, which the index stores, must not contain a password: set MILVUS_TOKEN")
        where = {"uri": place, "collection": collection, "index_type": index_type}
        info, shards = cls._described(embeddings, ids, **where, **facts)
        if uri is not None:
            cls.require_named(place)
        index = cls(info, list(ids), None, np.arange(len(ids)), shards=shards)
        if not index._inside:
            index._require_new()
        return index

    @classmethod
    def _connect(cls, uri: str, collection: str, *, new: bool = False) -> MilvusCollection:
        return MilvusCollection(uri if "://" in uri else Path(uri), collection, new=new)

    def _at_settings(self, *, new: bool = False) -> MilvusCollection:
        return self._at(self._directory, new=new) if self._inside else super()._at_settings(new=new)

    def _at(self, directory: Path, *, new: bool = False) -> MilvusCollection:
        return MilvusCollection(directory / INSIDE, self.info.settings["collection"], new=new)

    @property
    def _inside(self) -> bool:
        return self.info.settings["uri"] == INSIDE

    def _opened(self) -> MilvusCollection:
        if self._collection is None and self._shards is not None and self._inside:
            self._make_temporary()
        return super()._opened()

    def _make_temporary(self) -> None:
        closing = contextlib.ExitStack()
        self._directory, self._own = closing.enter_context(temporary_directory()), True
        weakref.finalize(self, closing.close)

    def _changeable(self) -> MilvusCollection:
        """Returns a collection to change; a collection in a saved index directory is copied first."""
        if self._inside and self._shards is None and not self._own:
            self.close()
            source = self._directory / INSIDE
            self._make_temporary()
            shutil.copytree(source, self._directory / INSIDE)
        return self._opened()

    def _save_engine(self, directory: Path) -> None:
        if self._inside and self._shards is not None:
            self._fill(self._at(directory, new=True))
        elif self._inside:
            self.close()
            shutil.copytree(self._directory / INSIDE, directory / INSIDE)
        super()._save_engine(directory)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> MilvusIndex:
        index = cls(info, ids, documents, read_rows(directory, info), directory=directory)
        index.require_trusted(directory)
        index._opened()
        return index
