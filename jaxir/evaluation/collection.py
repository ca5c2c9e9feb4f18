"""A model on a test collection: encode, search exactly, score."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxir.data.sources import BeirFolder
from jaxir.errors import UserError
from jaxir.evaluation.judgements import by_query
from jaxir.evaluation.retrieval import (
    DEFAULT_METRICS,
    IdenticalIds,
    RetrievalScores,
    check_depth,
    evaluate_run,
)
from jaxir.retrieval.indexes.exact import ExactIndex


class TextEncoder(Protocol):
    """What is asked of a model: texts to float32 vectors [N, D], to be compared by `similarity`."""

    similarity: str

    def encode_queries(self, texts: list[str]) -> np.ndarray: ...

    def encode_passages(self, texts: list[str]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collection:
    """A corpus with judged queries.

    Attributes:
      document_ids: ids of the documents.
      documents: their texts, (title + " " + text).strip().
      query_ids: ids of the judged queries.
      queries: their texts.
      qrels: query id to document id to relevance.
    """

    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: dict[str, dict[str, int]]


def read_collection(directory: str | Path, split: str = "test") -> Collection:
    """Reads a BEIR folder: its corpus and the queries that `split` judges.

    Raises:
      BadInputError: a malformed line, a repeated id, or a judgement of an unknown document or query.
      UserError: `directory` is no BEIR folder or has no such split.
    """
    folder = BeirFolder(directory)
    folder.qrels_path(split)  # a misspelt split should not cost the time to read the corpus
    documents = {document.id: document.contents for document in folder.corpus()}
    queries = {query.id: query.text for query in folder.queries()}
    qrels = by_query(folder.qrels(split, query_ids=queries, document_ids=documents))
    return Collection(
        document_ids=list(documents),
        documents=list(documents.values()),
        query_ids=list(qrels),
        queries=[queries[query_id] for query_id in qrels],
        qrels=qrels,
    )


def search_collection(
    encoder: TextEncoder, collection: Collection, *, depth: int
) -> dict[str, dict[str, float]]:
    """Encodes the collection and returns each query's `depth` best documents with their scores.

    Raises:
      UserError: depth is below 1.
    """
    if depth < 1:
        raise UserError(f"depth must be at least 1, not {depth}")
    passages = encoder.encode_passages(collection.documents)
    queries = encoder.encode_queries(collection.queries)
    return search_vectors(queries, passages, collection, similarity=encoder.similarity, depth=depth)


def search_vectors(
    queries: np.ndarray, passages: np.ndarray, collection: Collection, *, similarity: str, depth: int
) -> dict[str, dict[str, float]]:
    """Returns each query's `depth` best documents, or all if there are fewer, with their scores.

    Args:
      queries: float32 [Q, D], of the collection's queries.
      passages: float32 [N, D], of its documents.
      collection: whose they are.
      similarity: "cosine" or "dot".
      depth: how many.
    """
    index = ExactIndex.build(passages, collection.document_ids, similarity=similarity)
    scores, ids = index.search(queries, depth)
    return {
        query_id: dict(zip(found, row.tolist(), strict=False))
        for query_id, found, row in zip(collection.query_ids, ids, scores, strict=True)
    }


def evaluate_collection(
    encoder: TextEncoder,
    collection: Collection,
    metrics: str = DEFAULT_METRICS,
    *,
    depth: int = 1000,
    identical_ids: IdenticalIds = "keep",
) -> RetrievalScores:
    """Scores a model on a collection by exact search.

    Args:
      encoder: the model.
      collection: what to search and how it is judged.
      metrics: as in `evaluate_run`.
      depth: answers a query has; metrics without a cutoff (AP, RR) see no more.
      identical_ids: as in `evaluate_run`; with "drop" one answer more is searched for.

    Raises:
      UserError: an unknown metric, one of more answers than `depth`, or depth is below 1.
    """
    check_depth(metrics, depth)
    run = search_collection(encoder, collection, depth=depth + (identical_ids == "drop"))
    return evaluate_run(run, collection.qrels, metrics, identical_ids=identical_ids, depth=depth)
