"""What every index can do, and the directory it is saved in.

Some engines search vectors (`VectorIndex`), some the words of a question; `Index.query_kind` says which, and
`retrieval.searcher.Searcher` asks either with texts. An index directory holds `index.json` (engine,
similarity, dimension, count, the model and its fingerprint), `ids.json` (ids, in the order of the rows), the
engine's own files and, where a corpus was given, the documents for display.
"""

import abc
import dataclasses
import importlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Natural, check_value, checked
from jaxir.retrieval.encoding.lengths import UnusableVectorError, first_unusable
from jaxir.retrieval.encoding.made_by import MadeBy
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.ids import check_new, check_there
from jaxir.storage.checksums import check, directory_with_checksums
from jaxir.storage.files import local_path
from jaxir.storage.json_files import made, read_json
from jaxir.storage.npy import pieces

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.embeddings import StoredEmbeddings

Similarity = Literal["cosine", "dot"]
# What a query is: a row of a matrix [Q, D], a text, or a dict of a learned sparse model's token weights.
QueryKind = Literal["vectors", "texts", "weights"]
# A matrix [N, D], or several that follow each other, for example the memory-mapped shards of an EMB_DIR.
Embeddings = np.ndarray | Sequence[np.ndarray]

ENGINES = {
    "exact": "jaxir.retrieval.indexes.exact:ExactIndex",
    "scann": "jaxir.retrieval.indexes.scann_index:ScannIndex",
    "milvus": "jaxir.retrieval.indexes.milvus_index:MilvusIndex",
    "lucene": "jaxir.retrieval.indexes.lucene_index:LuceneIndex",
    "lucene_impact": "jaxir.retrieval.indexes.lucene_index:LuceneImpactIndex",
    "entries": "jaxir.retrieval.indexes.entries_index:EntriesIndex",
    "parts": "jaxir.retrieval.indexes.parts_index:PartsIndex",
}
FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class IndexInfo:
    """What index.json says.

    Attributes:
      engine: a key of `ENGINES`.
      similarity: "cosine" or "dot" of vectors; "bm25" or "impact" of terms.
      dimension: D; 0 where there are no vectors.
      count: N.
      fingerprint: of the model that made the vectors; None where they came from elsewhere.
      model: the model as it was named to `encode`; None likewise.
      read_with: how documents were read with generated queries, in words; None: alone.
      tower: which tower of the model read the documents; None: not known, or entries, which are of passages.
      step: of a model that is a training run, the step of its checkpoint; None: unknown.
      max_length: tokens beyond which a document was cut; None: unknown.
      cut: number of documents that were cut; None: unknown.
      settings: the engine's own.
    """

    engine: str
    similarity: Literal["cosine", "dot", "bm25", "impact"]
    dimension: Natural
    count: Count
    fingerprint: str | None = None
    model: str | None = None
    read_with: str | None = None
    tower: Literal["query", "passage"] | None = None
    max_length: Count | None = None
    cut: Natural | None = None
    step: Natural | None = None

    @property
    def made_by(self) -> MadeBy:
        """The model as messages name it."""
        return MadeBy(self.model, self.step)

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


class Index(abc.ABC):
    """N documents under string ids, searched for the nearest of each query. Read one with `load_index`.

    Attributes:
      engine: its name, a key of `ENGINES`.
      query_kind: what `search` takes.
      changing: files in its directory that the engine changes when it is opened, which have no checksum.
      growing: directories in it in which there may be more files than have a checksum.
      similarities: a hint of what `info.similarity` may be.
      settings_hints: of what index.json must say of the engine's own settings; None is for none.
      info: what index.json says.
      ids: the N ids, in the order of the rows.
      documents: titles and texts by id, or None.
    """

    engine: ClassVar[str]
    query_kind: ClassVar[QueryKind]
    changing: ClassVar[tuple[str, ...]] = ()
    growing: ClassVar[tuple[str, ...]] = ()
    similarities: ClassVar[Any]
    settings_hints: ClassVar[Mapping[str, Any]] = {}

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
          queries: Q of what `query_kind` says: an array [Q, D], a list of texts, or a list of dicts.
          k: how many.

        Returns:
          (float32 scores [Q, K], for each query at most K ids), K = min(k, N). An engine that finds fewer
          for a query gives fewer ids and fills up its scores with -inf.

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

    def require_model(self, fingerprint: str, name: str | None = None, step: int | None = None) -> None:
        """Checks that queries encoded by a model may be searched here.

        Args:
          fingerprint: of the model.
          name: what messages call it.
          step: of a training run, the step of its checkpoint.

        Raises:
          UserError: the index was made by another model.
        """
        if self.info.fingerprint is not None and fingerprint != self.info.fingerprint:
            why = self.info.made_by.unlike(MadeBy(name, step)).replace("they were", "it was")
            other = "" if name == self.info.model else "give the model it was made with, or "
            raise UserError(
                f"the index cannot be searched with this model: {why}; {other}encode and index the corpus"
                " again"
            )

    def save(self, directory: str | Path, *, corpus: str | Path | None = None) -> None:
        """Writes the index to a new directory, which appears only when whole.

        Args:
          directory: where to.
          corpus: a corpus file whose titles and texts are stored beside the vectors, for display.

        Raises:
          UserError: the directory exists, or the corpus lacks a document of the index.
        """
        with directory_with_checksums(directory, without=self.changing) as aside:
            if corpus is not None:
                Documents.write(aside, corpus, self.ids)
            self.write_into(aside)

    def write_into(self, directory: Path) -> None:
        """Writes all but the documents for display into a directory."""
        self._save_engine(directory)
        describe(directory, self.info, self.ids)

    def close(self) -> None:  # noqa: B027  (most engines hold nothing)
        """Lets go of what the index holds outside this process's memory; it may still be searched."""


class VectorIndex(Index):
    """N vectors [N, D], searched by inner product or cosine.

    Build one with `ExactIndex.build` or `ScannIndex.build`.
    """

    query_kind = "vectors"
    similarities = Similarity

    @classmethod
    @abc.abstractmethod
    def build(
        cls,
        embeddings: Embeddings,
        ids: Sequence[str],
        *,
        similarity: Similarity = "cosine",
        fingerprint: str | None = None,
        model: str | None = None,
    ) -> "VectorIndex":
        """Makes an index of vectors [N, D] (one array, or shards of it) under N distinct ids.

        Raises:
          UserError: no vectors, ids that are not distinct or not N, or vectors that are not finite or longer
            than `lengths.LONGEST`.
        """

    @abc.abstractmethod
    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        """`search` with k <= N and queries as they are compared (normalised for cosine)."""

    def search(
        self, queries: Float[np.ndarray, "Q D"], k: int
    ) -> tuple[Float[np.ndarray, "Q K"], list[list[str]]]:
        """Returns the nearest documents of each query, best first.

        Documents of equal score stand in descending order of id, as trec_eval ranks them. Which of them are
        found where there are more than k is for the engine to say; "exact" finds the first in that order.

        Args:
          queries: vectors [Q, D] from the query tower of the model that made the index.
          k: how many.

        Returns:
          (float32 scores [Q, K], for each query K ids), K = min(k, N). An approximate engine that finds
          fewer for a query gives fewer ids and fills up its scores with -inf.

        Raises:
          UserError: the vectors have another dimension than the index, they are not finite or longer than
            `lengths.LONGEST`, or k < 1.
          TypeError: they are no floating-point numbers [Q, D].
        """
        check_k(k)
        # Not by jaxtyping, which takes as long as ScaNN does to answer one query.
        dtype = getattr(queries, "dtype", None)
        if dtype is None or queries.ndim != 2 or dtype.kind not in "fV":  # V: bfloat16
            found = f"a {type(queries).__name__}" if dtype is None else f"{dtype} {list(queries.shape)}"
            raise TypeError(f"queries are an array of floating-point numbers [Q, D], not {found}")
        if queries.shape[1] != self.info.dimension:
            raise UserError(
                f"the queries have {queries.shape[1]} dimensions and the index {self.info.dimension}:"
                " they come from different models"
            )
        queries = np.ascontiguousarray(queries, np.float32)
        if (found := first_unusable(queries)) is not None:
            row, reason = found
            raise UnusableVectorError(f"the vector of query {row + 1}", row, reason)
        if self.info.similarity == "cosine":
            queries = normalize(queries)
        return self._search(queries, min(k, self.info.count))

    def add(self, embeddings: Embeddings, ids: Sequence[str]) -> None:
        """Adds vectors [M, D] (one array, or shards of it) under new ids.

        What lies on disk stays as it is until `save` (in a Milvus that others use too: it changes at once).
        Documents for display, which the new ones lack, are let go; `updating.update_index` keeps them.

        Raises:
          UserError: as `build`, vectors of another dimension, or ids that are there already.
        """
        shards, new = checked(embeddings, ids, self.info.similarity)
        if shards[0].shape[1] != self.info.dimension:
            raise UserError(
                f"the new vectors have {shards[0].shape[1]} dimensions and the index {self.info.dimension}"
            )
        check_new(new, self.ids)
        self.documents = None
        try:
            self._add(shards, new)
        finally:
            self.info = dataclasses.replace(self.info, count=len(self.ids), cut=None)

    def delete(self, ids: Sequence[str]) -> None:
        """Removes documents. What lies on disk stays as it is, as with `add`.

        Raises:
          UserError: ids that are not there, or no document would be left.
        """
        check_there(ids, self.ids)
        gone = set(ids)
        if len(gone) == len(self.ids):
            raise UserError("no document would be left")
        try:
            self._delete(gone)
        finally:
            self.info = dataclasses.replace(self.info, count=len(self.ids), cut=None)

    @abc.abstractmethod
    def _add(self, shards: list[np.ndarray], ids: list[str]) -> None:
        """`add` of what is known to fit; it sees to `self.ids`."""

    @abc.abstractmethod
    def _delete(self, ids: set[str]) -> None:
        """`delete` of ids that are there; it sees to `self.ids`."""


def check_k(k: int) -> None:
    """Raises a UserError where `k` documents cannot be asked for."""
    if k < 1:
        raise UserError(f"k must be at least 1, not {k}")


def describe(directory: Path, info: IndexInfo, ids: Sequence[str]) -> None:
    """Writes what `load_index` reads beside the engine's own files."""
    (directory / "ids.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    content = {"format": FORMAT, **dataclasses.asdict(info)}
    (directory / "index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_index(directory: str | Path) -> Index:
    """Reads an index saved by `Index.save`. Its files are read whole, once, to compare their checksums.

    Raises:
      UserError: the directory is not an index, is damaged, or its engine is not installed.
    """
    directory = local_path(directory)
    while True:
        before = _inode(directory)
        try:
            index = _load_index(directory)
            if _inode(directory) == before:
                return index
            index.close()  # an update has put another there: nothing of two is mixed
        except UserError:
            if _inode(directory) == before:
                raise


def _inode(directory: Path) -> int | None:
    try:
        return directory.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def _load_index(directory: Path) -> Index:
    if not (path := directory / "index.json").is_file():
        raise UserError(f"{directory} is not an index: it has no index.json")
    try:
        content = read_json(path, dict[str, Any])
        if content.pop("format", FORMAT) != FORMAT or content.get("engine") not in list(ENGINES):
            known = f"format {FORMAT} and the engines {', '.join(ENGINES)}"
            raise UserError(f"index.json is of another version than this jaxir, which knows {known}")
        info = made(IndexInfo, content, path)
        index_class = engine(info.engine)
        for name, kind in index_class.settings_hints.items():
            check_value(f"{path}: the setting {name}", info.settings.get(name), kind)
        check_value(f"{path}: similarity", info.similarity, index_class.similarities)
        check(directory, without=(*index_class.changing, *index_class.growing))
        ids = read_json(directory / "ids.json", list[str])
    except UserError as error:
        raise UserError(f"{directory} is a damaged index: {error}") from None
    if len(ids) != info.count:
        raise UserError(f"{directory} is a damaged index: it has {len(ids)} ids of {info.count}")
    return index_class._load_engine(directory, info, ids, Documents.open(directory, ids))


def build_index(
    stored: "StoredEmbeddings", *, backend: str, model: str | None = None, **options: Any
) -> VectorIndex:
    """Builds an index of what `encode` wrote.

    Args:
      stored: from `open_embeddings`.
      backend: a key of `ENGINES` whose index takes vectors; of corpus expansion, of the entries.
      model: the model for queries, where it is not the one that encoded the passages.
      **options: what else the engine's `build` takes.

    Raises:
      UserError: there is no such backend, or it is not installed.
    """
    if not issubclass(index_class := engine(backend), VectorIndex):
        raise UserError(f"the {backend} engine takes a corpus, not embeddings")
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
    if stored.info.expansion != "corpus":  # entries say themselves how they are read, and are of passages
        read = {name: getattr(stored.info, name) for name in ("read_with", "tower", "max_length", "cut")}
        # The queries' model may be another one, of the same fingerprint.
        read["step"] = stored.info.step if model in (None, stored.info.model) else None
        index.info = dataclasses.replace(index.info, **read)
    return index


def engine(name: str) -> type[Index]:
    """Returns the class of an engine.

    Raises:
      UserError: there is no engine of that name.
    """
    if name not in ENGINES:
        raise UserError(f"there is no index engine {name!r}; there are {', '.join(ENGINES)}")
    module, cls = ENGINES[name].split(":")
    return getattr(importlib.import_module(module), cls)


def checked(
    embeddings: Embeddings, ids: Sequence[str], similarity: Similarity
) -> tuple[list[np.ndarray], list[str]]:
    """Returns the embeddings as shards and the ids as a list, once they are known to fit each other."""
    shards = [embeddings] if isinstance(embeddings, np.ndarray) else list(embeddings)
    ids = list(ids)
    if similarity not in ("cosine", "dot"):
        raise UserError(f"similarity must be cosine or dot, not {similarity!r}")
    if any(s.ndim != 2 or s.dtype != np.float32 for s in shards) or len({s.shape[1] for s in shards}) > 1:
        raise UserError("embeddings must be float32 arrays [N, D] of one D")
    count = sum(len(s) for s in shards)
    if not count:
        raise UserError("there are no embeddings to index")
    if count != len(ids):
        raise UserError(f"{count} embeddings and {len(ids)} ids: there must be one id for each")
    if len(set(ids)) != len(ids):
        twice = next(i for i, other in itertools.pairwise(sorted(ids)) if i == other)
        raise UserError(f"the id {twice!r} comes twice")
    start = 0
    for piece in pieces(shards, 16_384):  # no mask of a whole shard
        if (found := first_unusable(piece)) is not None:
            row, reason = found
            raise UnusableVectorError(f"the vector of {ids[start + row]!r}", start + row, reason)
        start += len(piece)
    return shards, ids


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors [N, D] of length 1; a zero vector stays zero."""
    norms = np.sqrt(np.add.reduce(vectors * vectors, axis=1, keepdims=True))  # np.linalg.norm's bits, sooner
    norms[norms == 0] = 1
    return vectors / norms
