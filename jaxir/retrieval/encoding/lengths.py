"""Vectors that can be compared: finite, and so short that their inner products fit into float32."""

from __future__ import annotations

import numpy as np

from jaxir.core.errors import UserError

# The inner product of two vectors of this length is 1e38. float32 ends at 3.4e38.
LONGEST = 1e19


class UnusableVectorError(UserError):
    """A vector that cannot be compared with others.

    Args:
      subject: what it is, for the sentence.
      row: its number among the vectors that were checked, from 0.
      reason: what is wrong with it, as the rest of the sentence.
    """

    def __init__(self, subject: str, row: int, reason: str):
        self.subject, self.row, self.reason = subject, row, reason
        super().__init__(f"{subject} {reason}")


def first_unusable(vectors: np.ndarray) -> tuple[int, str] | None:
    """Returns the first row of vectors [N, D] that cannot be compared, and why; None if all can."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)
    unusable = ~(squares <= LONGEST**2)  # NaN is not less
    if not unusable.any():
        return None
    row = int(np.argmax(unusable))
    if not np.isfinite(vectors[row]).all():
        return row, "has a number that is not finite"
    length = np.linalg.norm(vectors[row].astype(np.float64))
    return row, (
        f"is {length:.3g} long (at most {LONGEST:g}: scores of longer vectors do not fit into float32)"
    )
