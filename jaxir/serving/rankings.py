"""Turns the results of indexes into a system's ranking of documents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxir.retrieval.ranking.fusion import reciprocal_rank_fusion
from jaxir.serving.engines import Answer, Found

HYBRID, RERANKED = "hybrid", "reranked"


class Ranking(NamedTuple):
    """One system's documents for one query, best first.

    `ms` has milliseconds: "encode", "search" and "fuse" of the query's batch, "rerank" of the request, and
    "total" including waiting. `cut_at` is the number of characters of the query that the models read; None:
    all of them.
    """

    ids: list[str]
    scores: list[float]
    ms: dict[str, float]
    cut_at: int | None = None


def filtered(answers: Sequence[Answer], fits: Callable[[str], bool]) -> list[Answer]:
    """Returns answers with only the documents whose ids fit."""
    kept = []
    for answer in answers:
        found = {}
        for name, each in answer.found.items():
            pairs = [(i, score) for i, score in zip(each.ids, each.scores, strict=True) if fits(i)]
            found[name] = each._replace(ids=[i for i, _ in pairs], scores=[score for _, score in pairs])
        kept.append(answer._replace(found=found))
    return kept


def ranking_of(
    system: str,
    found: dict[str, Found],
    cuts: dict[str, int | None],
    elapsed: dict[str, float],
    wanted: Sequence[str],
    k: int,
) -> Ranking:
    """Returns a system's first k documents for one query.

    For each index, `found` has the results, `cuts` the characters read and `elapsed` the milliseconds. The
    hybrid fuses the indexes `wanted`.
    """
    if system != HYBRID:
        one = found[system]
        ms = {"encode": one.encode_ms, "search": one.search_ms, "total": elapsed[system]}
        return Ranking(one.ids[:k], one.scores[:k], ms, cuts[system])
    started = time.perf_counter()
    runs = [{"q": dict(zip(found[name].ids, found[name].scores, strict=True))} for name in wanted]
    fused = reciprocal_rank_fusion(runs, depth=k)["q"]
    fuse_ms = 1000 * (time.perf_counter() - started)
    ms = {"fuse": fuse_ms, "total": fuse_ms + max(elapsed[name] for name in wanted)}
    cut_at = min((cut for name in wanted if (cut := cuts[name]) is not None), default=None)
    return Ranking(list(fused), list(fused.values()), ms, cut_at)
