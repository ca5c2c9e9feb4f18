"""Evaluates a model on a test collection: encodes texts, searches exactly, and computes metrics."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import OnBadInput
from jaxir.evaluation.judgements import by_query
from jaxir.evaluation.retrieval_metrics import (
    DEFAULT_METRICS,
    IdenticalIds,
    RetrievalScores,
    check_depth,
    evaluate_run,
)
from jaxir.retrieval.indexes.in_memory import index_of
from jaxir.retrieval.ranking.exclusions import most_excluded, without_excluded


class TextEncoder(Protocol):
    """A model that encodes texts as vectors for `index_of`; `similarity_fn_name` says how to compare them."""

    similarity_fn_name: str

    def encode_queries(self, texts: list[str]) -> Any: ...

    def encode_passages(self, texts: list[str]) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collection:
    """A corpus with judged queries.

    Attributes:
      document_ids: the id of each document.
      documents: the text of each document, (title + " " + text).strip().
      query_ids: the id of each judged query that has a text.
      queries: the text of each query of `query_ids`.
      qrels: {query id: {document id: relevance}}. It may name queries and documents that do not exist. As in
        trec_eval, such a document is treated as not retrieved, and such a query scores 0.
      excluded: {query id: ids of documents that are left out of its results} (BRIGHT's excluded_ids).
    """

    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: dict[str, dict[str, int]]
    excluded: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def read_collection(directory: str | Path, split: str = "test", *, strict: bool = False) -> Collection:
    """Reads a collection (see `BeirFolder`): its corpus, and the queries that the split has judgements for.

    Repeated documents or queries, judgements of unknown documents or queries, and grades such as 1.0 are
    counted; a line on standard error reports the counts. With `strict` they raise a BadInputError.
    """
    collector = OnBadInput(strict=strict)
    folder = BeirFolder(directory, collector)
    path = folder.qrels_path(split)  # checks the name of the split before the corpus is read
    documents = {document.id: document.contents for document in folder.corpus()}
    queries = {query.id: query.text for query in folder.queries()}
    qrels = by_query(folder.qrels(split, query_ids=queries, document_ids=documents))
    asked = [query_id for query_id in qrels if query_id in queries]
    if not asked or not any(document in documents for judged in qrels.values() for document in judged):
        what = "documents" if asked else "queries"
        raise UserError(
            f"{path}: the collection has none of the {what} for which this file has judgements: check that"
            " corpus.jsonl, queries.jsonl and qrels belong together"
        )
    collector.report()
    excluded = folder.excluded()
    return Collection(
        document_ids=list(documents),
        documents=list(documents.values()),
        query_ids=asked,
        queries=[queries[query_id] for query_id in asked],
        qrels=qrels,
        excluded={query_id: excluded[query_id] for query_id in asked if query_id in excluded},
    )


def search_collection(
    encoder: TextEncoder, collection: Collection, *, depth: int
) -> dict[str, dict[str, float]]:
    """Encodes the collection; returns {query id: {document id: score}}, `depth` documents per query."""
    passages = encoder.encode_passages(collection.documents)
    queries = encoder.encode_queries(collection.queries)
    return search_vectors(queries, passages, collection, similarity=encoder.similarity_fn_name, depth=depth)


def search_vectors(
    queries: Any, passages: Any, collection: Collection, *, similarity: str, depth: int
) -> dict[str, dict[str, float]]:
    """Like `search_collection`, but for vectors of queries and passages, as `index_of` takes them."""
    index = index_of(passages, collection.document_ids, similarity=similarity)
    scores, ids = index.search(queries, depth + most_excluded(collection.excluded))
    run = {
        query_id: dict(zip(found, row.tolist(), strict=False))
        for query_id, found, row in zip(collection.query_ids, ids, scores, strict=True)
    }
    return without_excluded(run, collection.excluded, depth)


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
      collection: the documents, queries and judgements.
      metrics: names of metrics such as "nDCG@10 R@100"; see `evaluate_run`.
      depth: number of documents retrieved per query. Metrics without a cutoff (AP, RR) use only these.
      identical_ids: "drop" removes a document with its query's id, see `evaluate_run`; "keep" does not.

    Raises:
      UserError: an unknown metric, or a metric with a cutoff above `depth`.
    """
    check_depth(metrics, depth)
    run = search_collection(encoder, collection, depth=depth + (identical_ids == "drop"))
    return evaluate_run(run, collection.qrels, metrics, identical_ids=identical_ids, depth=depth)
