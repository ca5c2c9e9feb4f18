"""One collection of a Milvus server, or of an embedded milvus-lite.

A collection maps row numbers to vectors; the index directory maps rows to ids. An embedded Milvus runs on
threads of this process, so it ends with the process, and listens on a Unix socket that only its user can
reach. Only one process at a time can open its files.

An index directory from elsewhere may name any server. So jaxir only connects to a server that the user named,
in `MILVUS_URI` or in the call that builds an index; the token is only sent there, and encrypted.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging.config
import os
import threading
import urllib.parse
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.core.progress import progress
from jaxir.retrieval.indexes.database_index import IndexType, check_name, rows_to_send
from jaxir.storage.npy import pieces
from jaxir.storage.temporary_outputs import temporary_directory

TOKEN = "MILVUS_TOKEN"  # environment variable with "user:password" or an API key
PLACE = "MILVUS_URI"  # environment variable with the server (or embedded Milvus) that jaxir may open
CLEARTEXT = "MILVUS_CLEARTEXT"  # if this environment variable is 1, the token may be sent unencrypted
CONNECT_SECONDS = 10.0  # timeout of connecting
ANSWER_SECONDS = 60.0  # timeout of a request; building and loading have none
REQUEST_BYTES = 8 << 20  # maximum size of the vectors of a request; servers accept 64 MB
DELETED_AT_ONCE = 10_000  # maximum number of rows that a request deletes
QUERIES_AT_ONCE = (
    512  # maximum number of queries per request; an embedded Milvus holds 100,000 scores per query
)
ANSWERS_AT_ONCE = 100_000  # maximum number of results of a request, over all queries
FEW = 256  # no progress bar for up to this many queries, such as a server gets
THREADS = 4  # number of threads of an embedded Milvus
BUILD_PARAMETERS = {"HNSW": {"M": 16, "efConstruction": 200}}
ROW, VECTOR = "row", "vector"  # names of the collection's fields
MARK = "jaxir.mark"  # collection property with a random mark, by which an index recognises its collection


class MilvusCollection:
    """A connection to a collection; `where` is a server's URI with ://, or the path of an embedded Milvus."""

    def __init__(self, where: str | Path, name: str, *, new: bool = False):
        pymilvus = _pymilvus()
        check_name(name, 255)
        self.name, self._where = name, where
        if isinstance(where, Path) and not new and not where.is_dir():
            raise UserError(f"the embedded Milvus {where} does not exist: build the index again")
        token = "" if isinstance(where, Path) else _token(where)
        self._embedded = _embedded(where) if isinstance(where, Path) else None
        uri = where if self._embedded is None else self._embedded.uri
        with self._errors("cannot be reached"):
            self._client = pymilvus.MilvusClient(uri, token=token, timeout=CONNECT_SECONDS, dedicated=True)
        self._finalizer = weakref.finalize(self, self._client.close)

    def close(self) -> None:
        self._finalizer()
        self._embedded = None

    def exists(self) -> bool:
        with self._errors():
            return self._client.has_collection(self.name, timeout=CONNECT_SECONDS)

    def require_new(self) -> None:
        if self.exists():
            raise UserError(f"{self._where} already has a collection {self.name}: give another --collection")

    def open(self, dimension: int, mark: str | None) -> None:
        """Loads the collection; refuses another dimension, or the mark (a random id) of another index."""
        if not self.exists():
            raise UserError(f"{self._where} has no collection {self.name}: build the index again")
        with self._errors():
            described = self._client.describe_collection(self.name, timeout=CONNECT_SECONDS)
            fields = described["fields"]
            found = {field["name"]: field["params"].get("dim") for field in fields}
            if set(found) != {ROW, VECTOR} or int(found[VECTOR]) != dimension:
                raise UserError(
                    f"the collection {self.name} in {self._where} is not this index's: it has fields {found},"
                    f" not {ROW} and {VECTOR} of {dimension} dimensions; build the index again"
                )
            there = described.get("description") or described.get("properties", {}).get(MARK)
            if mark is not None and there and there != mark:
                raise UserError(
                    f"the collection {self.name} in {self._where} was made by another index: the collection"
                    " of this index was dropped, and its name was used again; build the index again"
                )
            self._client.load_collection(self.name)

    def create(
        self, vectors: Sequence[np.ndarray], index_type: IndexType, *, cosine: bool, mark: str | None
    ) -> None:
        """Makes a collection of vectors (shards [n, D]) with rows 0, 1, ...; drops it after any error."""
        pymilvus = _pymilvus()
        self.require_new()
        count, dimension = sum(map(len, vectors)), vectors[0].shape[1]
        schema = self._client.create_schema(auto_id=False, description=mark or "")
        schema.add_field(ROW, pymilvus.DataType.INT64, is_primary=True)
        schema.add_field(VECTOR, pymilvus.DataType.FLOAT_VECTOR, dim=dimension)
        index = self._client.prepare_index_params()
        index.add_index(
            VECTOR, index_type=index_type, metric_type="IP", params=BUILD_PARAMETERS.get(index_type, {})
        )
        with self._errors():
            # milvus-lite does not store the description, so the mark is also a property.
            kept = {} if self._embedded is None or mark is None else {"properties": {MARK: mark}}
            self._client.create_collection(self.name, schema=schema, timeout=ANSWER_SECONDS, **kept)
        try:
            self.insert(vectors, 0, cosine=cosine)
            with self._errors():
                # An embedded Milvus answers only when the index is built, so there is nothing to wait for.
                self._client.create_index(self.name, index, sync=self._embedded is None)
                self._client.load_collection(self.name)
            self.require_count(count)
        except BaseException:
            self.drop()
            raise

    def insert(self, vectors: Sequence[np.ndarray], first_row: int, *, cosine: bool) -> None:
        """Sends vectors (shards [n, D]), with consecutive rows from `first_row` on."""
        step = max(1, REQUEST_BYTES // (4 * vectors[0].shape[1]))
        row = first_row
        with progress(total=sum(map(len, vectors)), what="inserting", unit="passages") as bar:
            for piece in pieces(vectors, step):
                part = rows_to_send(piece, cosine=cosine)
                rows = [{ROW: row + i, VECTOR: vector} for i, vector in enumerate(part)]
                with self._errors():
                    self._client.insert(self.name, rows, timeout=ANSWER_SECONDS)
                row += len(rows)
                bar.update(len(rows))
        with self._errors():
            self._client.flush(self.name)

    def delete(self, rows: Sequence[int]) -> None:
        with self._errors():
            for at in range(0, len(rows), DELETED_AT_ONCE):
                part = [int(row) for row in rows[at : at + DELETED_AT_ONCE]]
                self._client.delete(self.name, ids=part, timeout=ANSWER_SECONDS)

    def delete_from(self, row: int) -> None:
        with self._errors():
            self._client.delete(self.name, filter=f"{ROW} >= {row}", timeout=ANSWER_SECONDS)

    def require_count(self, count: int) -> None:
        with self._errors():
            answer = self._client.query(
                self.name, output_fields=["count(*)"], consistency_level="Strong", timeout=ANSWER_SECONDS
            )
        if (found := answer[0]["count(*)"]) != count:
            raise UserError(
                f"the collection {self.name} in {self._where} has {found:,} vectors and the index {count:,}:"
                " run an interrupted update again, or build the index again if others changed the collection"
            )

    def search(
        self, queries: np.ndarray, k: int, index_type: IndexType
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns rows (int64) and inner products (float32) of the k nearest vectors of each query [Q, D]."""
        found = []
        step = max(1, min(QUERIES_AT_ONCE, ANSWERS_AT_ONCE // k))
        params = {"metric_type": "IP", "params": {"ef": max(200, 4 * k)} if index_type == "HNSW" else {}}
        few = len(queries) <= FEW
        with progress(total=len(queries), what="searching", unit="queries", hidden=few) as bar:
            for at in range(0, len(queries), step):
                part = list(queries[at : at + step])
                with self._errors():
                    answer = self._client.search(
                        self.name,
                        part,
                        limit=k,
                        anns_field=VECTOR,
                        search_params=params,
                        output_fields=[ROW],
                        timeout=ANSWER_SECONDS,
                    )
                found += [
                    (np.array(hits.ids, np.int64), np.array(hits.distances, np.float32)) for hits in answer
                ]
                bar.update(len(part))
        return found

    def drop(self) -> None:
        with contextlib.suppress(Exception):
            self._client.drop_collection(self.name, timeout=ANSWER_SECONDS)

    @contextlib.contextmanager
    def _errors(self, what: str = "failed") -> Iterator[None]:
        """Converts pymilvus' exceptions to a UserError of one sentence."""
        from grpc import RpcError
        from pymilvus.exceptions import MilvusException

        try:
            yield
        except (MilvusException, RpcError) as error:
            text = error.message if isinstance(error, MilvusException) else error.details()
            raise UserError(f"Milvus at {self._where} {what}: {' '.join(str(text).split())[:300]}") from error


def _token(uri: str) -> str:
    """Returns the token for a server. Raises a UserError if it would cross a network in clear text."""
    token = os.environ.get(TOKEN, "")
    if token and os.environ.get(CLEARTEXT) != "1":
        parts = urllib.parse.urlsplit(uri)
        if parts.scheme not in ("https", "unix") and not _is_loopback(parts.hostname or ""):
            raise UserError(
                f"{TOKEN} would go to {uri} in clear text: use https://, or set {CLEARTEXT}=1 to allow it"
            )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Embedded:
    """A running milvus-lite server that stores its data in a directory."""

    def __init__(self, path: Path):
        _pymilvus()
        try:
            import grpc
            from milvus_lite.adapter.grpc.servicer import MilvusServicer
            from milvus_lite.db import MilvusLite
            from milvus_lite.exceptions import DataDirLockedError
            from pymilvus.grpc_gen.milvus_pb2_grpc import add_MilvusServiceServicer_to_server
        except ImportError as error:
            raise UserError(_missing(error)) from None
        try:
            database = MilvusLite(str(path))
        except DataDirLockedError:
            raise UserError(
                f"{path} is open in another process: an embedded Milvus serves one process at a time;"
                " stop the other process, or use a server"
            ) from None
        except OSError as error:
            raise UserError(f"{path} cannot be opened: {(error.strerror or str(error)).lower()}") from None
        except Exception as error:  # milvus_lite, json and pyarrow raise errors of many types
            raise UserError(f"{path} is damaged: {error}; build the index again") from None
        closing = contextlib.ExitStack()
        sockets = closing.enter_context(temporary_directory())
        if len(os.fsencode(sockets)) > 90:  # a socket's path may not be longer than 100 bytes
            closing.close()
            sockets = closing.enter_context(temporary_directory(Path("/tmp")))
        self.uri = f"unix:{sockets}/socket"
        # milvus-lite's own server is not used: it listens on TCP, where every user of the machine could reach
        # it.
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="milvus")
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        server = grpc.server(pool, options=unlimited)
        add_MilvusServiceServicer_to_server(MilvusServicer(database), server)
        server.add_insecure_port(self.uri)
        server.start()
        weakref.finalize(self, _stop, server, pool, database, closing)


_running: weakref.WeakValueDictionary[tuple[int, int], _Embedded] = weakref.WeakValueDictionary()
_starting = threading.Lock()


def _embedded(path: Path) -> _Embedded:
    """Returns the embedded Milvus of a directory; all indexes of this process share it."""
    with _starting:
        path.mkdir(parents=True, exist_ok=True)
        identity = path.stat().st_dev, path.stat().st_ino
        running = _running.get(identity)
        if running is None:
            running = _running[identity] = _Embedded(path)
        return running


def _stop(server: Any, pool: ThreadPoolExecutor, database: Any, closing: contextlib.ExitStack) -> None:
    server.stop(grace=None).wait()
    pool.shutdown()
    database.close()
    closing.close()


@functools.cache
def _pymilvus() -> ModuleType:
    """Imports pymilvus, which takes seconds, without its side effects on the rest of the process."""
    configure, environment = logging.config.dictConfig, dict(os.environ)
    logging.config.dictConfig = lambda config: None  # pymilvus would close all logging handlers
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"  # keep pymilvus from reading a file .env
    os.environ.pop(PLACE, None)  # pymilvus fails on a URI that it cannot parse
    try:
        import pymilvus
    except ImportError as error:
        raise UserError(_missing(error)) from None
    finally:
        logging.config.dictConfig = configure
        os.environ.pop("PYTHON_DOTENV_DISABLED")
        os.environ.update(environment)
    for name in ("pymilvus", "milvus_lite"):  # hide log messages that repeat the errors
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return pymilvus


def _missing(error: ImportError) -> str:
    return f"the milvus backend needs pymilvus and milvus-lite ({error}): {how_to_install('milvus')}"
