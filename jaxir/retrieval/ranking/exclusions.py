"""Leaves documents out of the results of single queries, as BRIGHT's `excluded_ids` name them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

Excluded = Mapping[str, Collection[str]]  # ids of documents by the id of the query


def most_excluded(excluded: Excluded) -> int:
    """Returns the largest number of documents that a query excludes: how many more results are needed."""
    return max(map(len, excluded.values()), default=0)


def without_excluded(
    run: Mapping[str, Mapping[str, float]], excluded: Excluded, depth: int | None = None
) -> dict[str, dict[str, float]]:
    """Returns the documents that each query does not exclude, in their order: the first `depth`, or all."""
    if not excluded:
        return {query: dict(found) for query, found in run.items()}
    kept: dict[str, dict[str, float]] = {}
    for query, found in run.items():
        unwanted = set(excluded.get(query, ()))
        allowed = ((document, score) for document, score in found.items() if document not in unwanted)
        kept[query] = dict(itertools.islice(allowed, depth))
    return kept
