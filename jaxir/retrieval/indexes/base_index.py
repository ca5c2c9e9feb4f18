"""The interface of every index, and the directory that an index is saved in.

An index directory holds `index.json` (`IndexInfo`), `ids.json` (ids, in the order of the rows), the engine's
own files and, if a corpus was given, the documents that search results show.
"""

import abc
import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from jaxtyping import Float

from jaxir.core.errors import UserError
from jaxir.retrieval.encoding.lengths import UnusableVectorError, first_unusable
from jaxir.retrieval.encoding.made_by import MadeBy
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.ids import check_distinct, check_known, check_new
from jaxir.retrieval.indexes.index_info import FORMAT, IndexInfo, Similarity, describe
from jaxir.storage.checksums import check, directory_with_checksums
from jaxir.storage.files import local_path
from jaxir.storage.json_files import made, read_json
from jaxir.storage.npy import pieces

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.stored_embeddings import StoredEmbeddings

# What a query is: a row of a matrix [Q, D], a text, a row of a sparse matrix [Q, V] of token weights, a dict
# of such weights, or a matrix [tokens, D] of a multi-vector encoder.
QueryKind = Literal["vectors", "texts", "sparse", "weights", "token_vectors"]
# A matrix [N, D] or its shards, for example the shards of an EMB_DIR.
Embeddings = np.ndarray | Sequence[np.ndarray]

ENGINES = {
    "exact": "jaxir.retrieval.indexes.exact:ExactIndex",
    "scann": "jaxir.retrieval.indexes.scann_index:ScannIndex",
    "maxsim": "jaxir.retrieval.indexes.maxsim_index:MaxSimIndex",
    "milvus": "jaxir.retrieval.indexes.milvus_index:MilvusIndex",
    "bm25s": "jaxir.retrieval.indexes.bm25_index:Bm25Index",
    "qdrant": "jaxir.retrieval.indexes.qdrant_index:QdrantIndex",
    "pgvector": "jaxir.retrieval.indexes.pgvector_index:PgvectorIndex",
    "lucene": "jaxir.retrieval.indexes.lucene_index:LuceneIndex",
    "lucene_impact": "jaxir.retrieval.indexes.lucene_index:LuceneImpactIndex",
    "sparse": "jaxir.retrieval.indexes.sparse_index:SparseIndex",
    "entries": "jaxir.retrieval.indexes.entries_index:EntriesIndex",
    "parts": "jaxir.retrieval.indexes.parts_index:PartsIndex",
}


class Index(abc.ABC):
    """N documents with string ids; `search` finds the nearest documents of queries. Open one by `load_index`.

    Attributes:
      engine: the engine's name, a key of `ENGINES`.
      query_kind: what `search` takes; a "sparse" index may be one of "weights".
      changing: files of the index directory without a checksum: the engine changes them when it opens them.
      growing: directories in the index directory in which files without a checksum are allowed.
      info: the content of index.json.
      ids: the N ids, in the order of the rows.
      documents: titles and texts by id; None if they are not stored.
    """

    engine: ClassVar[str]
    query_kind: QueryKind
    changing: ClassVar[tuple[str, ...]] = ()
    growing: ClassVar[tuple[str, ...]] = ()

    def __init__(self, info: IndexInfo, ids: list[str], documents: Documents | None = None):
        self.info, self.ids, self.documents = info, ids, documents

    def __repr__(self) -> str:
        info = self.info
        kind = f"{info.dimension} dimensions, {info.similarity}" if info.dimension else info.similarity
        model = f", of {info.model}" if info.model else ""
        return f"{type(self).__name__}({info.count:,} documents, {kind}{model})"

    @abc.abstractmethod
    def search(self, queries: Any, k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Returns the nearest documents of each query, best first.

        Args:
          queries: Q queries of `query_kind`: an array [Q, D], a list of texts, a CSR matrix [Q, V], or a list
            of dicts.
          k: number of documents per query.

        Returns:
          (float32 scores [Q, K], list of at most K ids for each query), with K = min(k, N). If an engine
          finds fewer documents, it returns fewer ids, and the remaining scores are -inf.

        Raises:
          UserError: k < 1, or the queries do not fit the index.
        """

    @abc.abstractmethod
    def _save_engine(self, directory: Path) -> None:
        """Writes the engine's files into `directory`."""

    @classmethod
    @abc.abstractmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> "Index":
        """Reads what `_save_engine` wrote."""

    def require_model(
        self,
        fingerprint: str,
        name: str | None = None,
        step: int | None = None,
        weights: str | None = None,
    ) -> None:
        """Raises a UserError, with the fields of `MadeBy`, if the index's model has another fingerprint."""
        if self.info.fingerprint is not None and fingerprint != self.info.fingerprint:
            made_by = MadeBy(name, step, weights)
            why = self.info.made_by.difference_from(made_by).replace("they were", "it was")
            other = "" if name == self.info.model else "give the model it was made with, or "
            if name == self.info.model and weights != self.info.weights:
                other = "give the same weights, or "
            raise UserError(
                f"the index cannot be searched with this model: {why}; {other}encode and index the corpus"
                " again"
            )

    def save(self, directory: str | Path, *, corpus: str | Path | None = None) -> None:
        """Writes the index to a new directory, which appears only when complete.

        Args:
          directory: the new directory.
          corpus: a corpus file; its titles and texts are stored, to be shown with search results.

        Raises:
          UserError: the directory exists, or the corpus lacks a document of the index.
        """
        with directory_with_checksums(directory, without=self.changing) as temporary:
            if corpus is not None:
                Documents.write(temporary, corpus, self.ids)
            self.write_into(temporary)

    def write_into(self, directory: Path) -> None:
        self._save_engine(directory)
        describe(directory, self.info, self.ids)

    def close(self) -> None:  # noqa: B027  (most engines have nothing to release)
        """Releases resources outside this process's memory. The index can still be searched."""


class VectorIndex(Index):
    """N vectors [N, D], searched by inner product or cosine.

    Build one with `build` of `ExactIndex`, `ScannIndex`, `MilvusIndex`, `PgvectorIndex` or `QdrantIndex`.
    """

    query_kind = "vectors"

    @classmethod
    @abc.abstractmethod
    def build(cls, embeddings: Embeddings, ids: Sequence[str], **facts: Any) -> Self:
        """Makes an index of float32 vectors [N, D] (an array or its shards) with N distinct ids.

        `**facts` are keyword arguments of `describe_vectors`; engines have further options.
        """

    @abc.abstractmethod
    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Like `search`, but k <= N, and queries for cosine have length 1."""

    def search(
        self, queries: Float[np.ndarray, "Q D"], k: int
    ) -> tuple[Float[np.ndarray, "Q K"], list[list[str]]]:
        """Like `Index.search`, but for vectors [Q, D] from the query tower of the index's model.

        Documents of equal score are in descending order of id, like trec_eval ranks them. If more than k
        documents tie, the engine decides which are found; "exact" finds the first in that order.

        Raises:
          UserError: k < 1, the vectors have another dimension than the index, are not finite, or are longer
            than `lengths.LONGEST`.
          TypeError: the queries are not floating-point numbers [Q, D].
        """
        check_k(k)
        # Not checked by jaxtyping, which would take as long as ScaNN takes for one query.
        dtype = getattr(queries, "dtype", None)
        if dtype is None or queries.ndim != 2 or dtype.kind not in "fV":  # numpy reports bfloat16 as kind V
            found = f"a {type(queries).__name__}" if dtype is None else f"{dtype} {list(queries.shape)}"
            raise TypeError(f"queries must be an array of floating-point numbers [Q, D], not {found}")
        if queries.shape[1] != self.info.dimension:
            raise UserError(
                f"the queries have {queries.shape[1]} dimensions and the index has {self.info.dimension}:"
                " encode the queries with the model of the index"
            )
        queries = np.ascontiguousarray(queries, np.float32)
        if (found := first_unusable(queries)) is not None:
            row, reason = found
            raise UnusableVectorError(f"the vector of query {row + 1}", row, reason)
        if self.info.similarity == "cosine":
            queries = normalize(queries)
        return self._search(queries, min(k, self.info.count))

    def add(self, embeddings: Embeddings, ids: Sequence[str]) -> None:
        """Adds vectors [M, D] (an array or its shards) with new ids.

        Files only change at `save`, but a database outside the index directory changes at once. Stored titles
        and texts are dropped; `updating.update_index` keeps them.

        Raises:
          UserError: a vector is not finite, too long or of another dimension, or an id is in the index.
        """
        shards, new = checked(embeddings, ids, self.info.similarity), list(ids)
        if shards[0].shape[1] != self.info.dimension:
            raise UserError(
                f"the new vectors have {shards[0].shape[1]} dimensions and the index has"
                f" {self.info.dimension}: encode the new passages with the model of the index"
            )
        check_new(new, self.ids)
        self.documents = None
        self._add(shards, new)
        self.info = dataclasses.replace(self.info, count=len(self.ids), cut=None)

    def delete(self, ids: Sequence[str]) -> None:
        """Removes documents. Files only change at `save`, but a database outside the directory changes at
        once.

        Raises:
          UserError: an id is unknown, or no document would be left.
        """
        check_known(ids, self.ids)
        gone = set(ids)
        if len(gone) == len(self.ids):
            raise UserError("no document would be left in the index: delete fewer, or build a new index")
        self._delete(gone)
        self.info = dataclasses.replace(self.info, count=len(self.ids), cut=None)

    def _add(self, shards: list[np.ndarray], ids: list[str]) -> None:
        raise not_changed(self)

    def _delete(self, ids: set[str]) -> None:
        raise not_changed(self)


def check_k(k: int) -> None:
    if k < 1:
        raise UserError(f"k must be at least 1, not {k}")


def not_changed(index: Index) -> UserError:
    return UserError(f"an index of engine {index.engine} cannot be changed in place: build it again")


def load_index(directory: str | Path) -> Index:
    """Reads an index saved by `Index.save`, and verifies its checksums.

    Raises:
      UserError: the directory is not an index, is damaged, or its engine is not installed.
    """
    directory = local_path(directory)
    if not (path := directory / "index.json").is_file():
        raise UserError(f"{directory} is not an index directory: it has no index.json; give another")
    try:
        content = read_json(path, dict[str, Any])
        if content.pop("format", FORMAT) != FORMAT or content.get("engine") not in list(ENGINES):
            known = f"format {FORMAT} and the engines {', '.join(ENGINES)}"
            raise UserError(
                f"index.json was written by another version of jaxir; this version reads {known}; build the"
                " index again"
            )
        info = made(IndexInfo, content, path)
        index_class = engine(info.engine)
        check(directory, without=(*index_class.changing, *index_class.growing))
        ids = read_json(directory / "ids.json", list[str])
    except UserError as error:
        raise UserError(f"{directory} is damaged: {error}; build it again with jaxir.index") from None
    if len(ids) != info.count:
        raise UserError(f"{directory} is damaged: it has {len(ids)} of {info.count} ids; build it again")
    return index_class._load_engine(directory, info, ids, Documents.open(directory, ids))


def build_index(
    stored: "StoredEmbeddings", *, backend: str, model: str | None = None, **options: Any
) -> VectorIndex:
    """Builds an index of the vectors of jaxir.encode; `model` encodes queries (None: the passages' model)."""
    if not issubclass(index_class := engine(backend), VectorIndex):
        raise UserError(f"the {backend} engine takes a corpus, not embeddings: give --corpus")
    if stored.info.expansion == "corpus":
        index_class, options = engine("entries"), options | {"backend": backend}
    index = index_class.build(
        stored.shards,
        stored.ids,
        similarity=stored.info.similarity,
        fingerprint=stored.info.fingerprint,
        model=model or stored.info.model,
        **options,
    )
    index.info = dataclasses.replace(index.info, weights=stored.info.weights, fde=stored.info.fde)
    if stored.info.expansion != "corpus":
        read = {name: getattr(stored.info, name) for name in ("read_with", "tower", "max_length", "cut")}
        # The step is unknown if `model` is another name for the same weights.
        read["step"] = stored.info.step if model in (None, stored.info.model) else None
        index.info = dataclasses.replace(index.info, **read)
    return index


def engine(name: str) -> type[Index]:
    if name not in ENGINES:
        raise UserError(f"there is no index engine {name!r}; give one of {', '.join(ENGINES)}")
    module, cls = ENGINES[name].split(":")
    return getattr(importlib.import_module(module), cls)


def describe_vectors(
    engine: str,
    embeddings: Embeddings,
    ids: Sequence[str],
    *,
    similarity: Similarity = "cosine",
    fingerprint: str | None = None,
    model: str | None = None,
) -> tuple[IndexInfo, list[np.ndarray]]:
    """Returns the content of index.json for vectors, except the engine's settings, and their shards."""
    shards = checked(embeddings, ids, similarity)
    info = IndexInfo(
        engine=engine,
        similarity=similarity,
        dimension=shards[0].shape[1],
        count=len(ids),
        fingerprint=fingerprint,
        model=model,
    )
    return info, shards


def checked(embeddings: Embeddings, ids: Sequence[str], similarity: Similarity) -> list[np.ndarray]:
    """Returns vectors as shards. Raises a UserError for unusable vectors, or without N distinct ids."""
    shards = [embeddings] if isinstance(embeddings, np.ndarray) else list(embeddings)
    if similarity not in ("cosine", "dot"):
        raise UserError(f"similarity must be cosine or dot, not {similarity!r}")
    if any(s.ndim != 2 or s.dtype != np.float32 for s in shards) or len({s.shape[1] for s in shards}) > 1:
        raise UserError("embeddings must be float32 arrays [N, D], all with the same D")
    count = sum(len(s) for s in shards)
    if not count:
        raise UserError("there are no embeddings to index: give at least one vector")
    if count != len(ids):
        raise UserError(f"there are {count} embeddings but {len(ids)} ids: give one id for each vector")
    check_distinct(ids)
    start = 0
    for piece in pieces(shards, 16_384):  # small pieces bound the memory of the check
        if (found := first_unusable(piece)) is not None:
            row, reason = found
            raise UnusableVectorError(f"the vector of {ids[start + row]!r}", start + row, reason)
        start += len(piece)
    return shards


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors [N, D] of length 1; a zero vector stays zero."""
    norms = np.sqrt(np.add.reduce(vectors * vectors, axis=1, keepdims=True))  # faster than np.linalg.norm
    norms[norms == 0] = 1
    return vectors / norms
