"""Search by PostgreSQL with the extension pgvector, on a server."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import weakref
from collections.abc import Iterator, Sequence
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

PLACE = "PGVECTOR_URI"  # environment variable with the URI of the database that jaxir may open
SECRET = "PGPASSWORD"  # libpq's environment variable with the password
CONNECT_SECONDS = 10  # timeout of connecting
COPY_BYTES = 8 << 20  # maximum size of the vectors that are converted at once
QUERIES_AT_ONCE = 64  # maximum number of queries of a statement
FEW = 256  # no progress bar for up to this many queries, such as a server gets
LONGEST_HNSW = 2000  # maximum number of dimensions of pgvector's HNSW indexes of float32 vectors
BUILD_PARAMETERS = "m = 16, ef_construction = 200"
EF_SEARCH = 200  # least number of candidates of an HNSW search; pgvector's maximum is 1000
MARK = "jaxir.mark "  # prefix of the table's comment: a random mark, by which an index recognises it
SAFE_MODES = ("require", "verify-ca", "verify-full")  # values of libpq's sslmode that encrypt always
INSTALLED = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
COLUMNS = """
    SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped
"""
# The subquery is evaluated for each query, so that it can use an HNSW index.
NEAREST = """
    SELECT query.number, nearest.row, nearest.score
    FROM unnest(%s::text[]::vector[]) WITH ORDINALITY AS query (vector, number),
    LATERAL (
        SELECT row, -(vector <#> query.vector) AS score FROM {table} ORDER BY vector <#> query.vector LIMIT %s
    ) AS nearest
"""


class PgvectorTable:
    """A connection to a table with the columns `row` (bigint) and `vector`.

    A build is one transaction, so a killed build leaves no table.
    """

    def __init__(self, uri: str, name: str):
        check_name(name, 63)
        self.name, self._uri = name, uri
        self._connect()

    def _connect(self) -> None:
        psycopg = _psycopg()
        how: dict[str, Any] = {"autocommit": True, "connect_timeout": CONNECT_SECONDS}
        if not _may_send_password(parameters_of(self._uri)):
            how["require_auth"] = "!password"  # refuses a server that requests the password in clear text
        with self._errors("cannot be reached"):
            self._connection = psycopg.connect(self._uri, **how)
        self._finalizer = weakref.finalize(self, self._connection.close)

    def close(self) -> None:
        self._finalizer()

    def _ask(self, statement: str, values: Sequence[Any] = ()) -> list[tuple]:
        from psycopg import sql

        if self._connection.closed or self._connection.broken:  # for example, the server was restarted
            self._connect()
            self._prepare_search()
        with self._errors():
            cursor = self._connection.execute(
                sql.SQL(statement).format(table=sql.Identifier(self.name)), values or None
            )
            return cursor.fetchall() if cursor.description else []

    def _exists(self) -> bool:
        return self._ask("SELECT to_regclass(%s)", [f'"{self.name}"'])[0][0] is not None

    def require_new(self) -> None:
        if self._exists():
            raise UserError(f"{self._uri} already has a table {self.name}: give another --collection")

    def open(self, dimension: int, mark: str | None) -> None:
        if not self._exists():
            raise UserError(f"{self._uri} has no table {self.name}: build the index again")
        found = dict(self._ask(COLUMNS, [f'"{self.name}"']))
        expected = {"row": "bigint", "vector": f"vector({dimension})"}
        if found != expected:
            raise UserError(
                f"the table {self.name} in {self._uri} is not this index's: it has the columns {found}, not"
                f" {expected}; build the index again"
            )
        there = self._ask("SELECT obj_description(%s::regclass)", [f'"{self.name}"'])[0][0]
        if mark is not None and there != MARK + mark:
            raise UserError(
                f"the table {self.name} in {self._uri} was made by another index: the table of this index was"
                " dropped, and its name was used again; build the index again"
            )
        self._prepare_search()

    def _prepare_search(self) -> None:
        """Lets an HNSW search continue until it has k results (a setting of pgvector 0.8)."""
        if _version(self._ask(INSTALLED)[0][0]) >= (0, 8):
            self._ask("SET hnsw.iterative_scan = strict_order")

    def create(
        self, vectors: Sequence[np.ndarray], index_type: IndexType, *, cosine: bool, mark: str | None
    ) -> None:
        from psycopg import sql

        dimension = vectors[0].shape[1]
        if index_type == "HNSW" and dimension > LONGEST_HNSW:
            raise UserError(
                f"pgvector's HNSW indexes take at most {LONGEST_HNSW} dimensions, not {dimension}: give"
                " --index_type=FLAT"
            )
        self._require_extension()
        self.require_new()
        with self._errors(), self._connection.transaction():
            self._ask(f"CREATE TABLE {{table}} (row bigint PRIMARY KEY, vector vector({dimension}) NOT NULL)")
            comment = sql.SQL("COMMENT ON TABLE {} IS {}")
            self._connection.execute(
                comment.format(sql.Identifier(self.name), sql.Literal(MARK + (mark or "")))
            )
            self.insert(vectors, 0, cosine=cosine)
            if index_type == "HNSW":
                self._ask(
                    f"CREATE INDEX ON {{table}} USING hnsw (vector vector_ip_ops) WITH ({BUILD_PARAMETERS})"
                )
        self._ask("ANALYZE {table}")

    def _require_extension(self) -> None:
        if self._ask(INSTALLED):
            return
        try:
            self._ask("CREATE EXTENSION vector")
        except UserError as error:
            raise UserError(
                f"{error}; install pgvector on the server, and run CREATE EXTENSION vector in this database"
            ) from error

    def insert(self, vectors: Sequence[np.ndarray], first_row: int, *, cosine: bool) -> None:
        from psycopg import sql

        statement = sql.SQL("COPY {} (row, vector) FROM STDIN (FORMAT BINARY)").format(
            sql.Identifier(self.name)
        )
        step, row = max(1, COPY_BYTES // (4 * vectors[0].shape[1])), first_row
        with (
            progress(total=sum(map(len, vectors)), what="inserting", unit="passages") as bar,
            self._errors(),
            self._connection.cursor() as cursor,
            cursor.copy(statement) as copy,
        ):
            copy.write(b"PGCOPY\n\xff\r\n\0" + bytes(8))
            for piece in pieces(vectors, step):
                copy.write(_binary_rows(rows_to_send(piece, cosine=cosine), row))
                row += len(piece)
                bar.update(len(piece))
            copy.write(b"\xff\xff")

    def delete(self, rows: Sequence[int]) -> None:
        self._ask("DELETE FROM {table} WHERE row = ANY(%s)", [list(rows)])

    def delete_from(self, row: int) -> None:
        self._ask("DELETE FROM {table} WHERE row >= %s", [row])

    def require_count(self, count: int) -> None:
        if (found := self._ask("SELECT count(*) FROM {table}")[0][0]) != count:
            raise UserError(
                f"the table {self.name} in {self._uri} has {found:,} vectors and the index {count:,}: run an"
                " interrupted update again, or build the index again if others changed the table"
            )

    def search(
        self, queries: np.ndarray, k: int, index_type: IndexType
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        if index_type == "HNSW":
            self._ask(f"SET hnsw.ef_search = {min(1000, max(EF_SEARCH, 4 * k))}")
        found = []
        hidden = len(queries) <= FEW
        with progress(total=len(queries), what="searching", unit="queries", hidden=hidden) as bar:
            for at in range(0, len(queries), QUERIES_AT_ONCE):
                part = queries[at : at + QUERIES_AT_ONCE]
                texts = [f"[{','.join(map(str, query))}]" for query in part.tolist()]
                answer = self._ask(NEAREST, [texts, k])
                numbers = np.array([number for number, _, _ in answer], np.int64)
                rows = np.array([row for _, row, _ in answer], np.int64)
                scores = np.array([score for _, _, score in answer], np.float32)
                found += [(rows[of := numbers == n], scores[of]) for n in range(1, len(part) + 1)]
                bar.update(len(part))
        return found

    def drop(self) -> None:
        with contextlib.suppress(UserError):
            self._ask("DROP TABLE IF EXISTS {table}")

    @contextlib.contextmanager
    def _errors(self, what: str = "failed") -> Iterator[None]:
        """Converts psycopg's exceptions to a UserError of one sentence."""
        try:
            yield
        except _psycopg().Error as error:
            text = " ".join(str(error).split())[:300]
            raise UserError(f"PostgreSQL at {self._uri} {what}: {text}") from error


class PgvectorIndex(DatabaseIndex):
    """Vectors in a table of PostgreSQL with pgvector; `DatabaseIndex` describes updates and ties.

    Such an index is only loaded if the variable PGVECTOR_URI is the same URI.
    """

    engine = "pgvector"
    place, secret = PLACE, SECRET

    @classmethod
    def build(
        cls,
        embeddings: Embeddings,
        ids: Sequence[str],
        *,
        uri: str | None = None,
        collection: str = COLLECTION,
        index_type: IndexType = "FLAT",
        **facts: Any,
    ) -> PgvectorIndex:
        """Makes an index of vectors, which are sent to PostgreSQL at `save` or at the first search.

        Args:
          embeddings: float32 vectors [N, D], an array or its shards; D is at most 16,000.
          ids: N distinct ids.
          uri: postgresql://user@host/database; the password is in PGPASSWORD or libpq's other places.
          collection: the name of the table to make.
          index_type: FLAT compares all vectors and is exact; HNSW (D at most 2000) is not.
          **facts: `similarity` ("cosine", the default, or "dot"), and the `model` and its `fingerprint`.

        Raises:
          UserError: ids and vectors do not match, vectors are not finite or too long, PostgreSQL cannot be
            reached, the table exists, or PGVECTOR_URI names another database.
        """
        if uri is None:
            raise UserError("--backend=pgvector needs --uri=postgresql://USER@HOST/DATABASE")
        if index_type == "AUTOINDEX":
            raise UserError("pgvector has the index types FLAT and HNSW, not AUTOINDEX: give one of them")
        if parameters_of(uri).get("password"):
            raise UserError(f"--uri, which the index stores, must not contain a password: set {SECRET}")
        cls.require_named(uri)
        where = {"uri": uri, "collection": collection, "index_type": index_type}
        return cls._new(embeddings, ids, **where, **facts)

    @classmethod
    def _connect(cls, uri: str, collection: str, *, new: bool = False) -> PgvectorTable:
        return PgvectorTable(uri, collection)


def parameters_of(uri: str) -> dict[str, Any]:
    """Returns libpq's parameters of a connection URI."""
    from_uri = _psycopg().conninfo.conninfo_to_dict
    if re.match(r"postgres(ql)?://", uri) is None:
        raise UserError(f"--uri must be postgresql://USER@HOST/DATABASE, not {uri}")
    try:
        return from_uri(uri)
    except _psycopg().Error as error:
        raise UserError(f"--uri is not a URI of PostgreSQL: {' '.join(str(error).split())}") from None


def _may_send_password(parameters: dict[str, Any]) -> bool:
    """Returns whether a password in clear text would stay on this machine or be encrypted."""
    if "require_auth" in parameters or parameters.get("sslmode") in SAFE_MODES:
        return True
    hosts = str(parameters.get("host") or parameters.get("hostaddr") or "").split(",")
    return all(not host or host.startswith("/") or _is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _binary_rows(part: np.ndarray, first_row: int) -> bytes:
    """Returns vectors [n, D] as rows of PostgreSQL's binary COPY, with pgvector's binary format."""
    count, dimension = part.shape
    # Big-endian: number of fields; size and row; size and vector (dimension, two unused bytes, numbers).
    fields = [("fields", ">i2"), ("row_size", ">i4"), ("row", ">i8"), ("size", ">i4"), ("dimension", ">i2")]
    rows = np.zeros(count, [*fields, ("unused", ">i2"), ("vector", ">f4", (dimension,))])
    rows["fields"], rows["row_size"], rows["size"], rows["dimension"] = 2, 8, 4 + 4 * dimension, dimension
    rows["row"], rows["vector"] = np.arange(first_row, first_row + count), part
    return rows.tobytes()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise UserError(
            f"the pgvector backend needs psycopg ({error}): {how_to_install('pgvector')}"
        ) from None
    return psycopg
