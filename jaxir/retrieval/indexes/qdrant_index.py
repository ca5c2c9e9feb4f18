"""Search by Qdrant: a server, or the client's local mode, which keeps a collection in files.

The local mode stores pickles. So its files are never in an index directory, which may come from someone else,
and are only opened if the user names them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
import urllib.parse
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.core.progress import progress
from jaxir.retrieval.indexes.base_index import Embeddings
from jaxir.retrieval.indexes.database_index import (
    COLLECTION,
    DatabaseIndex,
    IndexType,
    check_name,
    rows_to_send,
)
from jaxir.storage.npy import pieces

PLACE = "QDRANT_URI"  # environment variable with the server or path that jaxir may open
SECRET = "QDRANT_API_KEY"  # environment variable with the key of a server
CLEARTEXT = "QDRANT_CLEARTEXT"  # if this environment variable is 1, the key may be sent unencrypted
ANSWER_SECONDS = 60  # timeout of a request
REQUEST_BYTES = 2 << 20  # maximum size of the vectors of a request, whose JSON is some five times as large
QUERIES_AT_ONCE = 64  # maximum number of queries of a request
ROWS_AT_ONCE = 10_000  # maximum number of rows that a request deletes or lists
FEW = 256  # no progress bar for up to this many queries, such as a server gets
EF = 200  # least number of candidates of an HNSW search
MARK = "jaxir_mark"  # metadata key of a random mark, by which an index recognises its collection


class QdrantCollection:
    """A connection to a collection whose points have the rows as ids, and no payload."""

    def __init__(self, uri: str, name: str, *, new: bool = False):
        check_name(name, 255)
        self.name, self._uri = name, uri
        self._local = None
        if "://" in uri:
            with self._errors("cannot be reached"):
                self._client = _qdrant().QdrantClient(
                    url=uri,
                    api_key=_key(uri),
                    timeout=ANSWER_SECONDS,
                    check_compatibility=False,  # the check would only print a warning
                )
            self._finalizer = weakref.finalize(self, self._client.close)
        elif not new and not Path(uri).is_dir():
            raise UserError(f"the local Qdrant {uri} does not exist: build the index again")
        else:
            self._local = _local(Path(uri))
            self._client = self._local.client
            self._finalizer = None

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._local = self._client = None

    def _exists(self) -> bool:
        with self._errors("cannot be reached"):
            return self._client.collection_exists(self.name)

    def require_new(self) -> None:
        if self._exists():
            raise UserError(f"{self._uri} already has a collection {self.name}: give another --collection")

    def open(self, dimension: int, mark: str | None) -> None:
        if not self._exists():
            raise UserError(f"{self._uri} has no collection {self.name}: build the index again")
        with self._errors():
            config = self._client.get_collection(self.name).config
        found = getattr(config.params.vectors, "size", None)
        if found != dimension:
            raise UserError(
                f"the collection {self.name} in {self._uri} is not this index's: its vectors have {found}"
                f" dimensions, not {dimension}; build the index again"
            )
        if mark is not None and (config.metadata or {}).get(MARK) != mark:
            raise UserError(
                f"the collection {self.name} in {self._uri} was made by another index: the collection of this"
                " index was dropped, and its name was used again; build the index again"
            )

    def create(
        self, vectors: Sequence[np.ndarray], index_type: IndexType, *, cosine: bool, mark: str | None
    ) -> None:
        models = _qdrant().models
        self.require_new()
        with self._errors():
            self._client.create_collection(
                self.name,
                vectors_config=models.VectorParams(size=vectors[0].shape[1], distance=models.Distance.DOT),
                # m is the number of neighbours in the graph; 0 makes none.
                hnsw_config=models.HnswConfigDiff(m=0 if index_type == "FLAT" else 16),
                metadata={MARK: mark or ""},
            )
        try:
            self.insert(vectors, 0, cosine=cosine)
            self.require_count(sum(map(len, vectors)))
        except BaseException:
            self.drop()
            raise

    def insert(self, vectors: Sequence[np.ndarray], first_row: int, *, cosine: bool) -> None:
        models = _qdrant().models
        step, row = max(1, REQUEST_BYTES // (4 * vectors[0].shape[1])), first_row
        with progress(total=sum(map(len, vectors)), what="inserting", unit="passages") as bar:
            for piece in pieces(vectors, step):
                part = rows_to_send(piece, cosine=cosine)
                points = models.Batch(ids=list(range(row, row + len(part))), vectors=part.tolist())
                with self._errors():
                    self._client.upsert(self.name, points, wait=True)
                row += len(part)
                bar.update(len(part))

    def delete(self, rows: Sequence[int]) -> None:
        models = _qdrant().models
        for at in range(0, len(rows), ROWS_AT_ONCE):
            selector = models.PointIdsList(points=list(rows[at : at + ROWS_AT_ONCE]))
            with self._errors():
                self._client.delete(self.name, selector, wait=True)

    def delete_from(self, row: int) -> None:
        rows, start = [], row
        while start is not None:
            with self._errors():
                listed, start = self._client.scroll(
                    self.name, offset=start, limit=ROWS_AT_ONCE, with_payload=False, with_vectors=False
                )
            rows += [point.id for point in listed]
        self.delete(rows)

    def require_count(self, count: int) -> None:
        with self._errors():
            found = self._client.count(self.name, exact=True).count
        if found != count:
            raise UserError(
                f"the collection {self.name} in {self._uri} has {found:,} vectors and the index {count:,}:"
                " run an interrupted update again, or build the index again if others changed the collection"
            )

    def search(
        self, queries: np.ndarray, k: int, index_type: IndexType
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        models = _qdrant().models
        exact = index_type == "FLAT"
        how = models.SearchParams(exact=exact, hnsw_ef=None if exact else max(EF, 4 * k))
        found = []
        hidden = len(queries) <= FEW
        with progress(total=len(queries), what="searching", unit="queries", hidden=hidden) as bar:
            for at in range(0, len(queries), QUERIES_AT_ONCE):
                part = queries[at : at + QUERIES_AT_ONCE].tolist()
                requests = [models.QueryRequest(query=query, limit=k, params=how) for query in part]
                with self._errors():
                    answers = self._client.query_batch_points(self.name, requests)
                for answer in answers:
                    rows = np.array([point.id for point in answer.points], np.int64)
                    found.append((rows, np.array([point.score for point in answer.points], np.float32)))
                bar.update(len(part))
        return found

    def drop(self) -> None:
        with contextlib.suppress(Exception):
            self._client.delete_collection(self.name)

    @contextlib.contextmanager
    def _errors(self, what: str = "failed") -> Iterator[None]:
        """Converts the client's exceptions to a UserError of one sentence, and hides its warnings."""
        _qdrant()
        from qdrant_client.http.exceptions import ApiException

        try:
            with warnings.catch_warnings():
                # The client warns of local collections of more than 20,000 points, and of keys in clear text.
                warnings.filterwarnings("ignore", module="jaxir|qdrant_client")
                yield
        except (ApiException, ValueError, OSError) as error:
            text = " ".join(str(error).split())[:300]
            raise UserError(f"Qdrant at {self._uri} {what}: {text}") from error


class QdrantIndex(DatabaseIndex):
    """Vectors in a collection of Qdrant; `DatabaseIndex` describes updates and ties.

    Such an index is only loaded if the variable QDRANT_URI is the same URI or path.
    """

    engine = "qdrant"
    place, secret = PLACE, SECRET

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
    ) -> QdrantIndex:
        """Makes an index of vectors, which are sent to Qdrant at `save` or at the first search.

        Args:
          embeddings: float32 vectors [N, D], an array or its shards.
          ids: N distinct ids.
          uri: a server (https://host:6333, with its key in the variable QDRANT_API_KEY), or the path of a
            local Qdrant outside the index directory.
          collection: the name of the collection to make.
          index_type: FLAT compares all vectors and is exact; HNSW is not (except in a local Qdrant).
          **facts: `similarity` ("cosine", the default, or "dot"), and the `model` and its `fingerprint`.

        Raises:
          UserError: ids and vectors do not match, vectors are not finite or too long, Qdrant cannot be
            reached, the collection exists, QDRANT_URI names another one, or the key would cross a network in
            clear text (unless QDRANT_CLEARTEXT=1).
        """
        if uri is None:
            raise UserError("--backend=qdrant needs --uri=https://HOST:6333, or the path of a local Qdrant")
        if index_type == "AUTOINDEX":
            raise UserError("Qdrant has the index types FLAT and HNSW, not AUTOINDEX: give one of them")
        place = str(uri)
        if "://" not in place:
            place = str(Path(place).absolute())
        elif "@" in place:
            raise UserError(f"--uri, which the index stores, must not contain a password: set {SECRET}")
        elif not place.startswith(("http://", "https://")):
            raise UserError(f"--uri must be http://HOST:6333, https://HOST:6333 or a path, not {place}")
        cls.require_named(place)
        where = {"uri": place, "collection": collection, "index_type": index_type}
        return cls._new(embeddings, ids, **where, **facts)

    @classmethod
    def _connect(cls, uri: str, collection: str, *, new: bool = False) -> QdrantCollection:
        return QdrantCollection(uri, collection, new=new)


def _key(uri: str) -> str | None:
    """Returns the key for a server. Raises a UserError if it would cross a network in clear text."""
    key = os.environ.get(SECRET) or None
    if key is not None and os.environ.get(CLEARTEXT) != "1":
        parts = urllib.parse.urlsplit(uri)
        if parts.scheme != "https" and not _is_loopback(parts.hostname or ""):
            raise UserError(
                f"{SECRET} would go to {uri} in clear text: use https://, or set {CLEARTEXT}=1 to allow it"
            )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Local:
    """A local Qdrant, which holds a lock on its directory."""

    def __init__(self, path: Path):
        try:
            # jaxir uses an index from one thread at a time.
            self.client = _qdrant().QdrantClient(path=str(path), force_disable_check_same_thread=True)
        except RuntimeError:
            raise UserError(
                f"{path} is open in another process: a local Qdrant serves one process at a time; stop the"
                " other process, or use a server"
            ) from None
        except Exception as error:  # json, sqlite3 and pickle raise errors of many types
            raise UserError(
                f"{path} cannot be opened as a local Qdrant ({error}); build the index again"
            ) from None
        weakref.finalize(self, self.client.close)


_open: weakref.WeakValueDictionary[Path, _Local] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _local(path: Path) -> _Local:
    """Returns the local Qdrant of a directory; all indexes of this process share it."""
    with _opening:
        local = _open.get(path := path.resolve())
        if local is None:
            local = _open[path] = _Local(path)
        return local


def _qdrant() -> Any:
    try:
        import qdrant_client
    except ImportError as error:
        raise UserError(
            f"the qdrant backend needs qdrant-client ({error}): {how_to_install('qdrant')}"
        ) from None
    return qdrant_client
