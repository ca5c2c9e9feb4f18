"""Reranks a run's best documents with a cross-encoder (Nogueira & Cho 2019)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.sources import read_wanted
from jaxir.retrieval.ranking.runs import Run, rank

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.pair_scorer import CrossEncoder


class Candidates(NamedTuple):
    """The documents to rerank per query, best first, and the texts of queries and documents by id."""

    found: dict[str, list[str]]
    queries: dict[str, str]
    documents: dict[str, str]


def read_candidates(run: Run, folder: BeirFolder, *, depth: int) -> Candidates:
    """Reads the texts of the `depth` best documents of each query of a run; streams the corpus."""
    queries = texts_of_queries(folder, run, "is a query of the run")
    found = {query_id: rank(answers)[:depth] for query_id, answers in run.items()}
    named = set().union(*found.values())
    documents = read_wanted(folder.corpus_path, named, named_by="the run has found")
    return Candidates(found, queries, {document.id: document.contents for document in documents})


def texts_of_queries(folder: BeirFolder, wanted: Collection[str], why: str) -> dict[str, str]:
    """Returns the texts of `wanted` queries by id. If a query is missing, the error ends with `why`."""
    queries = {query.id: query.text for query in folder.queries() if query.id in wanted}
    if lacking := set(wanted) - queries.keys():
        raise UserError(f"{folder.queries_path} lacks query {min(lacking)!r}, which {why}")
    return queries


def rerank(candidates: Candidates, scorer: CrossEncoder) -> Run:
    found, queries, documents = candidates
    pairs = [(queries[query_id], documents[d]) for query_id, some in found.items() for d in some]
    scores = iter(scorer.score(pairs))
    return {query_id: {d: next(scores) for d in some} for query_id, some in found.items()}


def with_rest(scored: Run, run: Run) -> Run:
    """Adds the run's other documents below the reranked documents, in order, each with a score 1 lower."""
    found = {}
    for query_id, of_query in scored.items():
        rest = [document for document in rank(run[query_id]) if document not in of_query]
        lowest = min(of_query.values())
        found[query_id] = {**of_query, **{d: lowest - n for n, d in enumerate(rest, 1)}}
    return found
