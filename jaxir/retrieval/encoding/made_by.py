"""The name and step of the model that made vectors, as messages report them."""

from __future__ import annotations

from typing import NamedTuple


class MadeBy(NamedTuple):
    """A model's name, and the step of its checkpoint if it is a training run; None means unknown.

    `weights` is how the model was quantised ("int8", "nf4"); None means not at all.
    """

    name: str | None
    step: int | None = None
    weights: str | None = None

    def __str__(self) -> str:
        return self.name or "a model without a name"

    def difference_from(self, other: MadeBy) -> str:
        """Returns a clause for errors: how this model, which made vectors, differs from the model `other`."""
        if self.name is None or self.name != other.name:
            return f"they were made with {self}, not with {other}"
        if self.weights != other.weights:
            own, others = (made.weights or "unquantised" for made in (self, other))
            return f"they were made with {own} weights of {self}, not with {others} weights"
        if self.step != other.step and None not in (self.step, other.step):
            return f"{self} was trained further since then (step {self.step} to {other.step})"
        return f"{self} has changed since then"
