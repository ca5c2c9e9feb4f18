"""Semantic textual similarity (STS): rank correlation of cosine similarities and human scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxir.evaluation import pair_space
from jaxir.evaluation.collection import TextEncoder
from jaxir.evaluation.pair_space import PairSpace
from jaxir.evaluation.sts_files import SentencePair

PairSets = Mapping[str, Sequence[SentencePair]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class STSScores:
    """Spearman's rank correlation x 100 between human scores and the cosine of two sentences' vectors.

    Attributes:
      spearman: the correlation of each set, then summaries of several sets as in papers: "all" is the
          correlation over the pairs of all sets, "mean" the mean of the sets' values, "wmean" the mean
          weighted by numbers of pairs.
      pairs: the number of pairs of each value of `spearman`.
      space: alignment, uniformity and recall of each set, and of "all".
    """

    spearman: dict[str, float]
    pairs: dict[str, int]
    space: dict[str, PairSpace]


def evaluate_sts(encoder: TextEncoder, sets: PairSets) -> STSScores:
    """Evaluates a model on sets of rated pairs (from `read_sts`); the query tower encodes both sentences."""
    return scores_of(sets, encoder.encode_queries(sentences_of(sets)))


def sentences_of(sets: PairSets) -> list[str]:
    """Returns the distinct sentences of all pairs, sorted."""
    return sorted({text for pairs in sets.values() for p in pairs for text in (p.sentence1, p.sentence2)})


def scores_of(sets: PairSets, vectors: np.ndarray) -> STSScores:
    """Scores float32 vectors [N, D] of the N sentences `sentences_of(sets)`; they need not be normalised."""
    row = {text: i for i, text in enumerate(sentences_of(sets))}
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.where(lengths > 0, lengths, 1)
    together = {**sets, "all": [pair for pairs in sets.values() for pair in pairs]}
    spearman, space = {}, {}
    for name, pairs in together.items():
        rows = np.array([[row[p.sentence1], row[p.sentence2]] for p in pairs])
        scores = np.array([p.score for p in pairs])
        first, second = (vectors[column] for column in rows.T)
        spearman[name] = _spearman(np.sum(first * second, axis=1), scores)
        space[name] = pair_space.measure(vectors, rows, scores)
    sizes = [len(pairs) for pairs in sets.values()]
    each = [spearman[name] for name in sets]
    spearman |= {"mean": float(np.mean(each)), "wmean": float(np.average(each, weights=sizes))}
    pairs = dict(zip(sets, sizes, strict=True)) | dict.fromkeys(("all", "mean", "wmean"), sum(sizes))
    return STSScores(spearman=spearman, pairs=pairs, space=space)


def _spearman(cosine: np.ndarray, scores: np.ndarray) -> float:
    if np.ptp(cosine) == 0:  # the model has collapsed: the correlation of equal values is undefined
        return 0.0
    from scipy import stats

    return 100 * float(stats.spearmanr(cosine, scores).statistic)
