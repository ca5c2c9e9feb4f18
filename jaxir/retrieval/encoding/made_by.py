"""Which model made vectors, and in which words another one is refused."""

from __future__ import annotations

from typing import NamedTuple


class MadeBy(NamedTuple):
    """A model as messages name it.

    Attributes:
      name: what was loaded; None: unknown.
      step: the step of the checkpoint, of a training run; None: unknown, or no run.
    """

    name: str | None
    step: int | None = None

    def __str__(self) -> str:
        return self.name or "a model without a name"

    def unlike(self, other: MadeBy) -> str:
        """Returns a clause on two models that differ: this one made vectors, the other one is given."""
        if self.name is None or self.name != other.name:
            return f"they were made with {self}, not with {other}"
        if self.step != other.step and None not in (self.step, other.step):
            return f"{self} has trained on since (step {self.step} to {other.step})"
        return f"{self} has changed since"
