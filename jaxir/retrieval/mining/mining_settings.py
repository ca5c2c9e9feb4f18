"""The settings of mining hard negatives, as flags of jaxir.mine and in Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, NotNegative, Rate, Seed, checked
from jaxir.data.formats.sources import key_digest


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MiningSettings:
    """How negatives are chosen; flags of `jaxir.mine`.

    Attributes:
      negatives: maximum number of negatives per query; queries without negatives are left out and counted.
      first: rank of the first document that is a candidate; the best document has rank 1.
      last: rank of the last document that is a candidate.
      sampling: take random candidates (random), or the best candidates (top).
      margin: only take documents that score at least this much less than the query's lowest positive; queries
        without a positive in the run are left out and counted.
      relative_margin: only take documents that score at least this share less than the query's lowest
        positive, such as 0.05 for at most 95 % of its score; else like margin.
      max_score: only take documents that score at most this much.
      seed: seed of random sampling.
    """

    negatives: Count = 7
    first: Count = 1
    last: Count = 200
    sampling: Literal["random", "top"] = "random"
    margin: NotNegative | None = None
    relative_margin: NotNegative | None = None
    max_score: float | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise UserError(f"--first={self.first} must be at most --last={self.last}: change one of them")

    @property
    def needs_positive(self) -> bool:
        """Whether a query without a positive in the run is left out."""
        return self.margin is not None or self.relative_margin is not None

    def ceiling(self, positives: Sequence[float]) -> float:
        """Returns the largest score that a negative may have, given the scores of the query's positives.

        With the lowest positive p this is p - margin (TopK-MarginPos), p - |p| relative_margin (TopK-PercPos;
        Moreira et al. 2024, NV-Retriever, arXiv:2407.15831) or max_score, whichever is less.
        """
        limits = [] if self.max_score is None else [self.max_score]
        if self.margin is not None:
            limits.append(min(positives) - self.margin)
        if self.relative_margin is not None:
            limits.append(min(positives) - abs(min(positives)) * self.relative_margin)
        return min(limits, default=math.inf)

    def order(self, query_id: str, count: int) -> Sequence[int]:
        """Returns the order in which a query's `count` candidates are taken; deterministic."""
        if self.sampling == "top":
            return range(count)
        return np.random.default_rng([self.seed, *key_digest(query_id)]).permutation(count).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class RelevanceSettings:
    """Which candidates a cross-encoder drops. Relevance is a probability, the sigmoid of the logit.

    Attributes:
      max_relevance: drop candidates whose relevance by the cross-encoder (a probability) exceeds this value,
        such as 0.1.
      relevance_margin: drop candidates unless their relevance by the cross-encoder (a probability) is at
        least this much below the relevance of the query's least relevant positive.
    """

    max_relevance: Rate | None = None
    relevance_margin: Rate | None = None

    @classmethod
    def of_flags(
        cls, cross_encoder: str | None, max_relevance: float | None, relevance_margin: float | None
    ) -> RelevanceSettings | None:
        """Returns the settings of a command's flags; None without a cross-encoder."""
        if cross_encoder is not None:
            return cls(max_relevance=max_relevance, relevance_margin=relevance_margin)
        if (max_relevance, relevance_margin) != (None, None):
            raise UserError(
                "--max_relevance and --relevance_margin only apply with --cross_encoder: omit them"
            )
        return None

    def __post_init__(self) -> None:
        if self.max_relevance is None and self.relevance_margin is None:
            raise UserError("--cross_encoder needs --max_relevance, --relevance_margin or both")
