"""What each engine is built with: the flags of `jaxir.index`, a dataclass an engine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Share, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class NearestSettings:
    """Settings of the engines scann and exact.

    Attributes:
      embeddings: for scann, exact and milvus, what jaxir.encode wrote; with --update, passages to add.
      corpus: the corpus, a .jsonl[.gz] or a .txt[.gz] with a text on each line, whose number is the id; its
        titles and texts are stored, for jaxir.search to show. With --embeddings, the one that was encoded;
        for lucene, what is indexed.
      model: for scann, exact and milvus, the model that jaxir.search should load for queries (default: the
        one that encoded the passages).
      storage: for scann and exact, the type of the vectors that decide the order of answers (default:
        float32); a smaller one costs recall, which is measured and told.
      target_recall: for scann, search no further than this recall@10 needs, tuned and measured against exact
        search; without it 200 candidates of an eighth of the leaves are compared. For exact, what TPUs'
        approximate top-k shall find; on other devices an exact index finds all the same.
      queries: queries.jsonl[.gz] for --target_recall and --storage, half to tune on and half to measure on
        (default: passages are taken for queries).
      parts: for scann and exact, build so many indexes, each of its part of the passages, which are searched
        together (docs/big_corpora.md). Run again after an interruption, the same command builds those that
        are missing; several machines that see the same files, started as for training, each build some.
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
            raise UserError("--queries are what --target_recall is tuned and --storage is measured on")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MilvusSettings:
    """Settings of the engine milvus.

    Attributes:
      uri: for milvus, a server (https://host:19530, its token in the variable MILVUS_TOKEN) or the path of an
        embedded Milvus (default: one in the index directory). Whatever opens the index later wants the same
        in the variable MILVUS_URI.
      collection: for milvus, the name of the collection to make.
      index_type: for milvus, FLAT is exact, HNSW and AUTOINDEX (Milvus's choice) are not.
    """

    embeddings: str
    corpus: str | None = None
    model: str | None = None
    uri: str | None = None
    collection: str = "passages"
    index_type: Literal["FLAT", "HNSW", "AUTOINDEX"] = "FLAT"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LuceneSettings:
    """Settings of the engine lucene.

    Attributes:
      fields: for lucene, whether title and text are one field (flat) or two of equal weight.
      on_bad_input: for lucene, stop at the first malformed line of --corpus, or skip and count them; likewise
        for lucene_impact and --vectors.
    """

    corpus: str
    fields: Literal["flat", "multifield"] = "flat"
    on_bad_input: Literal["stop", "skip"] = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ImpactSettings:
    """Settings of the engine lucene_impact.

    Attributes:
      vectors: for lucene_impact, .jsonl[.gz] lines of {"id": ..., "vector": {token: weight}}, the weights
        whole numbers, as Anserini's collections of SPLADE, uniCOIL and DeepImpact have them.
    """

    vectors: str
    corpus: str | None = None
    on_bad_input: Literal["stop", "skip"] = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class UpdateSettings:
    """Settings of `index --update`.

    Attributes:
      delete: for --update, a file with the ids of passages to take out first, one on a line.
    """

    embeddings: str | None = None
    corpus: str | None = None
    delete: str | None = None
    on_bad_input: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if self.embeddings is self.corpus is self.delete is None:
            raise UserError("--update needs --embeddings, --corpus or --delete")
        if self.on_bad_input != "stop" and (self.embeddings is not None or self.corpus is None):
            raise UserError("--on_bad_input is for the --corpus of a lucene index: leave it out")


SETTINGS = {
    "--backend=scann": NearestSettings,
    "--backend=exact": NearestSettings,
    "--backend=milvus": MilvusSettings,
    "--backend=lucene": LuceneSettings,
    "--backend=lucene_impact": ImpactSettings,
    "--update": UpdateSettings,
}
