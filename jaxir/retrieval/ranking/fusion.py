"""Fuses runs: reciprocal ranks, interpolated scores, rescoring, round-robin.

A run is {query id: {document id: score}}, and so are all results. A query that only some runs have is fused
from those runs. Ranks are those of trec_eval: by score in float32, then by document id, both descending.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.ranking.runs import Run, rank

Normalization = Literal["min_max", "z_score", "none"]
Answers = Mapping[str, float]


def reciprocal_rank_fusion(runs: Sequence[Run], *, constant: int = 60, depth: int = 1000) -> Run:
    """Scores a document by the sum of 1 / (constant + rank) over the runs that have it (Cormack et al. 2009).

    Args:
      runs: two or more runs.
      constant: added to ranks; a greater constant gives the first ranks less weight.
      depth: documents kept per query.

    Raises:
      UserError: fewer than two runs, or a run has no query in common with the others.
    """

    def fuse(lists: Sequence[Answers]) -> dict[str, float]:
        scores: dict[str, float] = {}
        for answers in lists:
            for place, doc_id in enumerate(rank(answers), start=1):
                scores[doc_id] = scores.get(doc_id, 0.0) + 1 / (constant + place)
        return scores

    return _per_query(runs, fuse, depth)


def interpolate(
    runs: Sequence[Run],
    *,
    weights: Sequence[float] | None = None,
    normalization: Normalization = "min_max",
    depth: int = 1000,
) -> Run:
    """Scores a document by the weighted sum of its normalised scores.

    Scores are normalised within a query and a run: `min_max` to [0, 1], `z_score` to mean 0 and deviation 1.
    A document that a run lacks gets the run's lowest normalised score for the query.

    Args:
      weights: a weight for each of the two or more runs; None: equal weights that add up to 1.
      normalization: how scores are normalised; `none` uses the scores of the runs.
      depth: documents kept per query.
    """
    weights = [1 / len(runs)] * len(runs) if weights is None else weights
    if len(weights) != len(runs):
        raise UserError(f"there are {len(runs)} runs but {len(weights)} weights: give a weight for each run")
    normalize = _NORMALIZATIONS[normalization]

    def fuse(lists: Sequence[Answers]) -> dict[str, float]:
        scores = dict.fromkeys(itertools.chain.from_iterable(lists), 0.0)
        for weight, answers in zip(weights, lists, strict=True):
            if not answers:
                continue
            values = normalize(np.fromiter(answers.values(), np.float64))
            found = dict(zip(answers, values.tolist(), strict=True))
            # With min_max the lowest score is 0, even if all scores are equal and therefore become 1.
            lowest = 0.0 if normalization == "min_max" else float(values.min())
            for doc_id in scores:
                scores[doc_id] += weight * found.get(doc_id, lowest)
        return scores

    return _per_query(runs, fuse, depth)


def rescore(first: Run, second: Run, *, alpha: float, depth: int = 1000) -> Run:
    """Scores the `depth` best documents of the first run by `first + alpha * second` (Wang 2022, eq. 5.1).

    In the paper, `first` is a BM25 run, and `second` has dense scores (see `rescoring.score_candidates`).
    `second` must have scores of all these documents.
    """
    scored: Run = {}
    for query_id, answers in first.items():
        other = second.get(query_id, {})
        kept = rank(answers)[:depth]
        lacking = [doc_id for doc_id in kept if doc_id not in other]
        if lacking:
            raise UserError(
                f"query {query_id!r}: {len(lacking)} of {len(kept)} documents to rescore have no score in the"
                f" second run (such as {lacking[0]!r}): give a run that scores them"
            )
        scored[query_id] = {doc_id: answers[doc_id] + alpha * other[doc_id] for doc_id in kept}
    return scored


def round_robin(runs: Sequence[Run], *, depth: int = 1000) -> Run:
    """Takes the runs' best documents in turns, skipping duplicates (Chuang 2024, B.3).

    The first run's document is taken first. Scores are the reciprocals of the new ranks.
    """

    def fuse(lists: Sequence[Answers]) -> dict[str, float]:
        turns = itertools.zip_longest(*map(rank, lists))
        order = dict.fromkeys(d for turn in turns for d in turn if d is not None)
        return {doc_id: 1 / place for place, doc_id in enumerate(order, start=1)}

    return _per_query(runs, fuse, depth)


def oddities(runs: Mapping[str, Run]) -> list[str]:
    """Returns warnings about runs to fuse. Raises a UserError if a run shares no query with the others."""
    _check_queries(runs)
    odd = []
    for name, run in runs.items():
        others = [other for called, other in runs.items() if called != name]
        lacking = [q for q in dict.fromkeys(itertools.chain.from_iterable(others)) if q not in run]
        if lacking:
            odd.append(
                f"{name} has no documents for {len(lacking):,} of {len(lacking) + len(run):,} queries (such"
                f" as {lacking[0]!r}): is the run complete?"
            )
        if others and all(run[q].keys().isdisjoint(other.get(q, ())) for q in run for other in others):
            odd.append(f"{name} has no document in common with the others: are all runs of one corpus?")
    return odd


def _check_queries(runs: Mapping[str, Run]) -> None:
    for name, run in runs.items():
        others = [other for called, other in runs.items() if called != name]
        if others and all(run.keys().isdisjoint(other) for other in others):
            plural = "s" * (len(others) > 1)
            raise UserError(
                f"{name} shares no query with the other run{plural}: give runs of the same queries"
            )


def _per_query(runs: Sequence[Run], fuse: Callable[[Sequence[Answers]], dict[str, float]], depth: int) -> Run:
    if len(runs) < 2:
        raise UserError("fusion needs two or more runs: give another run")
    _check_queries({f"run {i}": run for i, run in enumerate(runs, start=1)})
    queries = dict.fromkeys(itertools.chain.from_iterable(runs))
    fused = {query_id: fuse([run.get(query_id, {}) for run in runs]) for query_id in queries}
    return {
        query_id: {doc_id: scores[doc_id] for doc_id in rank(scores)[:depth]}
        for query_id, scores in fused.items()
    }


def _min_max(scores: np.ndarray) -> np.ndarray:
    span = np.ptp(scores)
    # Equal scores become 1, because the documents were found.
    return (scores - scores.min()) / span if span else np.ones_like(scores)


def _z_score(scores: np.ndarray) -> np.ndarray:
    # Rounding of the mean can make the deviation of equal scores positive, so test the range of the scores.
    return (scores - scores.mean()) / scores.std() if np.ptp(scores) else np.zeros_like(scores)


_NORMALIZATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "min_max": _min_max,
    "z_score": _z_score,
    "none": lambda scores: scores,
}
