"""How hard negatives are chosen, as flags and in Python."""

from __future__ import annotations

import dataclasses
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
      negatives: of a query, at most; queries without any are left out and counted.
      first: rank of a run's answers from which on they are candidates, 1 for the best.
      last: the last such rank.
      sampling: take random candidates, or the best ones.
      margin: take only documents that score at least this much less than the query's lowest positive; queries
        without a positive in the run are left out and counted.
      seed: of random sampling.
    """

    negatives: Count = 7
    first: Count = 1
    last: Count = 200
    sampling: Literal["random", "top"] = "random"
    margin: NotNegative | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise UserError(f"first must be at most last: no ranks lie from {self.first} to {self.last}")

    def order(self, query_id: str, count: int) -> Sequence[int]:
        """Returns the order in which a query's `count` candidates, best first, are taken.

        It depends on nothing but these arguments.
        """
        if self.sampling == "top":
            return range(count)
        return np.random.default_rng([self.seed, *key_digest(query_id)]).permutation(count).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class RelevanceSettings:
    """Which candidates a cross-encoder drops. Relevance is a probability, the sigmoid of its logit.

    Attributes:
      max_relevance: drop candidates that the cross-encoder finds more relevant than this probability, such as
        0.1.
      relevance_margin: drop candidates that the cross-encoder does not find at least this much less relevant,
        as a probability, than the query's least relevant positive.
    """

    max_relevance: Rate | None = None
    relevance_margin: Rate | None = None

    @classmethod
    def of_flags(
        cls, cross_encoder: str | None, max_relevance: float | None, relevance_margin: float | None
    ) -> RelevanceSettings | None:
        """Returns what the flags of a command ask for, None where they ask for no cross-encoder.

        Raises:
          UserError: flags that do not go together.
        """
        if cross_encoder is not None:
            return cls(max_relevance=max_relevance, relevance_margin=relevance_margin)
        if (max_relevance, relevance_margin) != (None, None):
            raise UserError(
                "--max_relevance and --relevance_margin are of what a --cross_encoder says: give one"
            )
        return None

    def __post_init__(self) -> None:
        if self.max_relevance is None and self.relevance_margin is None:
            raise UserError("a cross-encoder needs max_relevance, relevance_margin or both to filter by")
