"""The settings of each engine, which are flags of `jaxir.index`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Natural, NotNegative, Share, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class NearestSettings:
    """Settings of the engines scann and exact.

    Attributes:
      embeddings: for scann, exact and databases, the output of jaxir.encode; with --update, passages to add.
      corpus: the corpus, a .jsonl[.gz], or a .txt[.gz] with a text on each line and the line number as id.
        With --embeddings, the corpus that was encoded, so that jaxir.search shows its titles and texts. For
        bm25s and lucene, the corpus to index; for sparse, the corpus to encode and index.
      model: for scann, exact and databases, the model that jaxir.search loads for queries (default: the model
        that encoded the passages). For sparse, the sparse encoder of passages and queries.
      storage: for scann and exact, the type of the stored vectors, which decide the order of results
        (default: float32); a smaller type costs recall, which is measured and printed. For sparse, float32,
        or int8: one byte for each weight.
      target_recall: for scann, search only as far as this recall@10 needs, tuned and measured against exact
        search; without it, an eighth of the leaves is searched and 200 candidates are compared. For exact,
        the recall of approximate top-k on TPUs; on other devices an exact index is always exact.
      queries: queries.jsonl[.gz] for --target_recall and --storage; half tune the index, half measure its
        recall (default: passages are used as queries).
      parts: for scann and exact, split the passages into this many indexes, which are searched together
        (docs/big_corpora.md). After an interruption, the same command builds the missing parts. Several
        machines with a common file system, started as for training, share the parts.
    """

    embeddings: str
    corpus: str | None = None
    model: str | None = None
    storage: Literal["float32", "bfloat16", "int8"] | None = None
    target_recall: Share | None = None
    queries: str | None = None
    parts: Count | None = None

    def __post_init__(self) -> None:
        if self.queries is not None and self.storage is None and self.target_recall is None:
            raise UserError("--queries only applies with --target_recall or --storage: give one of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MaxSimSettings:
    """Settings of the engine maxsim.

    Attributes:
      token_storage: for maxsim, how tokens' vectors are stored: a centroid and 2 or 4 bits for each component
        (default: 4bit), or float16.
      candidates: for maxsim, the number of passages of a query that are compared by MaxSim (default: 256);
        0: all, which is exact for the stored vectors.
    """

    embeddings: str
    corpus: str | None = None
    model: str | None = None
    token_storage: Literal["2bit", "4bit", "float16"] = "4bit"
    candidates: Natural = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DatabaseSettings:
    """Settings of the engines milvus, qdrant and pgvector.

    Attributes:
      uri: for milvus, a server (https://host:19530, with its token in the variable MILVUS_TOKEN) or the path
        of an embedded Milvus (default: one in the index directory). For qdrant, a server
        (https://host:6333, with its key in QDRANT_API_KEY) or the path of a local Qdrant. For pgvector,
        postgresql://user@host/database (with the password in PGPASSWORD). Commands that open the index later
        need the same value in the variable MILVUS_URI, QDRANT_URI or PGVECTOR_URI.
      collection: for milvus, qdrant and pgvector, the name of the collection or table to make.
      index_type: for milvus, qdrant and pgvector, how they search: FLAT is exact, HNSW and AUTOINDEX
        (Milvus's choice) are not.
    """

    embeddings: str
    corpus: str | None = None
    model: str | None = None
    uri: str | None = None
    collection: str = "passages"
    index_type: Literal["FLAT", "HNSW", "AUTOINDEX"] = "FLAT"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Bm25Settings:
    """Settings of the engine bm25s.

    Attributes:
      k1: for bm25s, BM25's k1: how much repeated words raise a score (default: 0.9).
      b: for bm25s, BM25's b: how much a document's length lowers its score, 0 to 1 (default: 0.4).
    """

    corpus: str
    k1: NotNegative = 0.9
    b: Share = 0.4
    on_bad_input: Literal["stop", "skip"] = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LuceneSettings:
    """Settings of the engine lucene.

    Attributes:
      fields: for lucene, index title and text as one field (flat) or as two equal fields (multifield).
      on_bad_input: for bm25s and lucene, stop at the first malformed line of --corpus, or skip and count
        malformed lines; for lucene_impact and sparse, the same for --vectors.
    """

    corpus: str
    fields: Literal["flat", "multifield"] = "flat"
    on_bad_input: Literal["stop", "skip"] = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ImpactSettings:
    """Settings of the engine lucene_impact.

    Attributes:
      vectors: for lucene_impact, a .jsonl[.gz] with lines {"id": ..., "vector": {token: weight}}, where
        weights are whole numbers, as in Anserini's collections of SPLADE, uniCOIL and DeepImpact. For sparse,
        such vectors instead of encoding --corpus; --model may name the model that made them.
    """

    vectors: str
    corpus: str | None = None
    on_bad_input: Literal["stop", "skip"] = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SparseSettings:
    """Settings of the engine sparse.

    Attributes:
      vectors: see `ImpactSettings`.
      storage: see `NearestSettings`.
    """

    corpus: str | None = None
    model: str | None = None
    vectors: str | None = None
    storage: Literal["float32", "bfloat16", "int8"] | None = None
    on_bad_input: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if self.vectors is None and (self.model is None or self.corpus is None):
            raise UserError("--backend=sparse needs --model and --corpus, or --vectors")
        if self.storage == "bfloat16":
            raise UserError("a sparse index holds weights in float32 or int8, not in bfloat16: give another")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class UpdateSettings:
    """Settings of `index --update`.

    Attributes:
      delete: for --update, a file with the ids of passages to delete first, one on each line.
    """

    embeddings: str | None = None
    corpus: str | None = None
    delete: str | None = None
    on_bad_input: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if self.embeddings is self.corpus is self.delete is None:
            raise UserError("--update needs --embeddings, --corpus or --delete")
        if self.on_bad_input != "stop" and (self.embeddings is not None or self.corpus is None):
            raise UserError("--on_bad_input only applies to the --corpus of a BM25 index: leave it out")


SETTINGS = {
    "--backend=scann": NearestSettings,
    "--backend=exact": NearestSettings,
    "--backend=maxsim": MaxSimSettings,
    "--backend=milvus": DatabaseSettings,
    "--backend=qdrant": DatabaseSettings,
    "--backend=pgvector": DatabaseSettings,
    "--backend=bm25s": Bm25Settings,
    "--backend=lucene": LuceneSettings,
    "--backend=lucene_impact": ImpactSettings,
    "--backend=sparse": SparseSettings,
    "--update": UpdateSettings,
}
