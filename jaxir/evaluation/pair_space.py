"""Geometry of the vectors of rated sentence pairs: alignment, uniformity, recall of equivalent sentences."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from jaxir.core.shapes import checked_shapes

POSITIVE = 4.0  # pairs with a score above 4 are positive pairs (Gao et al. 2021, SimCSE)
SAME = 5.0  # the score of pairs of sentences with the same meaning
CUTOFFS = (1, 5, 10)  # each k of recall@k
BLOCK = 1024  # maximum number of rows of the similarity matrix in memory at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSpace:
    """Properties of the vectors of rated pairs; a property is None if no pairs have the rating it needs."""

    alignment: float | None  # mean of |f(x) - f(x+)|^2 over pairs rated above 4; lower is better
    uniformity: float  # log of the mean of exp(-2 |f(x) - f(y)|^2) over all pairs x, y; lower is better
    recall: dict[int, float] | None  # k to the % of sentences whose partner (rated 5) is among the k nearest
    positives: int  # number of pairs over which `alignment` is computed
    same: int  # number of pairs over which `recall` is computed; each pair makes two queries

    def numbers(self) -> dict[str, float | None]:
        """Returns the values by their names in reports: alignment, uniformity, R@1, R@5, R@10."""
        recall = {f"R@{k}": None if self.recall is None else self.recall[k] for k in CUTOFFS}
        return {"alignment": self.alignment, "uniformity": self.uniformity, **recall}


@checked_shapes
def measure(
    vectors: Float[np.ndarray, "V D"], rows: Int[np.ndarray, "N 2"], scores: Float[np.ndarray, " N"]
) -> PairSpace:
    """Measures alignment and uniformity (Wang and Isola 2020) and recall (Chuang 2024, table 2.10).

    Args:
      vectors: the vectors of distinct sentences, each of length 1.
      rows: the two sentences of each pair, as row numbers of `vectors`.
      scores: the human score of each pair, from 0 or 1 to 5.
    """
    positive = rows[scores > POSITIVE]
    same = rows[(scores >= SAME) & (rows[:, 0] != rows[:, 1])]
    apart = np.square(vectors[positive[:, 0]] - vectors[positive[:, 1]]).sum(1)
    return PairSpace(
        alignment=float(apart.mean(dtype=np.float64)) if len(apart) else None,
        uniformity=uniformity(vectors[rows.ravel()]),
        recall=recall(vectors, np.unique(rows), same) if len(same) else None,
        positives=len(positive),
        same=len(same),
    )


@checked_shapes
def uniformity(vectors: Float[np.ndarray, "N D"]) -> float:
    """Returns log E exp(-2 |x - y|^2) over every two of N vectors of length 1 (Wang and Isola 2020, eq. 3).

    The vector of a sentence is repeated for each of its pairs, because p_data is the data's distribution.
    """
    total = 0.0
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        # |x - y|^2 = 2 - 2 xy, clipped at 0 because of rounding; triu keeps only columns j > i of row i.
        distances = np.maximum(2 - 2 * (block @ vectors[start:].T), 0)
        total += np.triu(np.exp(-2 * distances), 1).sum(dtype=np.float64)
    return float(np.log(total / (len(vectors) * (len(vectors) - 1) / 2)))


@checked_shapes
def recall(
    vectors: Float[np.ndarray, "V D"], corpus: Int[np.ndarray, " C"], pairs: Int[np.ndarray, "N 2"]
) -> dict[int, float]:
    """Returns {k: recall@k in %}: how often a sentence's partner is among its k nearest sentences.

    Each sentence of a pair is a query once, so N pairs make 2 N queries, as in Chuang 2024, table 2.10. The
    rows `corpus` of `vectors`, except the query, are searched. Of equal similarities the partner ranks last.
    """
    queries = np.concatenate([pairs, pairs[:, ::-1]])
    ranks = []
    for start in range(0, len(queries), BLOCK):
        query, partner = queries[start : start + BLOCK].T
        similarity = vectors[query] @ vectors[corpus].T
        wanted = similarity[np.arange(len(query)), np.searchsorted(corpus, partner)]
        similarity[corpus == query[:, None]] = -np.inf
        # This counts the partner itself, so ranks start at 1.
        ranks.append(np.sum(similarity >= wanted[:, None], axis=1))
    found = np.concatenate(ranks)
    return {k: 100 * float(np.mean(found <= k)) for k in CUTOFFS}
