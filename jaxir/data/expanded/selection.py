"""Ways to choose the generated query that expands a document in training, by relevance to the gold query."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxir.core.errors import UserError
from jaxir.core.values import Count, checked


class Selection:
    """A way to choose among the generated queries of a training pair's document.

    Attributes:
      ranks: whether queries are sorted by relevance to the pair's gold query, the most relevant first,
        without the gold query itself; if False, they keep the order of their file.
      draws: whether a random query of the range that `among` returns is chosen; if False, the first of the
          range.
      follows_steps: whether `among` depends on the step.
    """

    ranks: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    follows_steps: ClassVar[bool] = False

    def __repr__(self) -> str:
        # A resumed run compares this text, so it must not contain a memory address, as Python's default does.
        fields = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__qualname__}({fields})"

    def among(self, count: int, step: int, steps: int) -> tuple[int, int]:
        """Returns (first, end): which of `count` (1 or more) queries may be chosen at a step; here all."""
        return 0, count


@dataclasses.dataclass(frozen=True)
@checked
class Curriculum(Selection):
    """Curriculum sampling (He et al. 2022, section 3.2): from irrelevant queries to relevant ones.

    The n queries of a document, by descending relevance, are split into K groups: group k = 1 ... K has those
    from floor(n (k - 1) / K) to floor(n k / K). T steps are split into K equal stages. At step t (from 0), in
    stage i = floor(t K / T), one query of group K - i is drawn. If n is below K, an empty group has the query
    at which it would begin.

    Attributes:
      groups: K; the authors use 3 in their first round and 4 in the round with mined negatives.
    """

    groups: Count = 3
    follows_steps: ClassVar[bool] = True

    def among(self, count: int, step: int, steps: int) -> tuple[int, int]:
        stage = min(step * self.groups // steps, self.groups - 1)
        before = self.groups - 1 - stage
        first = count * before // self.groups
        return first, max(count * (before + 1) // self.groups, first + 1)


@dataclasses.dataclass(frozen=True)
class Random(Selection):
    """Any generated query, at random (He et al. 2022, figure 7, "random")."""


@dataclasses.dataclass(frozen=True)
@checked
class Top(Selection):
    """One of the k most relevant queries, at random (He et al. 2022, figure 7, "top-k").

    Attributes:
      k: number of queries.
    """

    k: Count = 1

    def among(self, count: int, step: int, steps: int) -> tuple[int, int]:
        return 0, min(self.k, count)


@dataclasses.dataclass(frozen=True)
@checked
class Bottom(Selection):
    """One of the k least relevant queries, at random (He et al. 2022, figure 7, "bottom-k").

    Attributes:
      k: number of queries.
    """

    k: Count = 1

    def among(self, count: int, step: int, steps: int) -> tuple[int, int]:
        return max(count - self.k, 0), count


@dataclasses.dataclass(frozen=True)
class First(Selection):
    """The document's first query in the file, whatever the gold query, for evaluation."""

    ranks: ClassVar[bool] = False
    draws: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Gold(Selection):
    """The gold query itself, for the positive and the hard negatives (Li et al. 2022; figure 7, "gold")."""

    ranks: ClassVar[bool] = False
    draws: ClassVar[bool] = False

    def among(self, count: int, step: int, steps: int) -> tuple[int, int]:
        return 0, 0


def selection_of(
    name: Literal["curriculum", "random", "top", "bottom", "first", "gold"], groups: int = 3, k: int = 1
) -> Selection:
    """Returns a selection by name: a curriculum of `groups`, or the top or bottom `k`."""
    if groups != Curriculum.groups and name != "curriculum":
        raise UserError(
            f"groups={groups} only applies to the selection 'curriculum', not to {name!r}: omit it"
        )
    if k != Top.k and name not in ("top", "bottom"):
        raise UserError(f"k={k} only applies to the selections 'top' and 'bottom', not to {name!r}: omit it")
    made = {"curriculum": Curriculum(groups), "random": Random(), "top": Top(k), "bottom": Bottom(k)}
    return (made | {"first": First(), "gold": Gold()})[name]
