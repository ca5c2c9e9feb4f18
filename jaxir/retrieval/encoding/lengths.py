"""Checks that vectors can be compared: that they are finite and inner products fit into float32."""

from __future__ import annotations

import numpy as np

from jaxir.core.errors import UserError

LONGEST = 1e19  # maximum norm; inner products are then at most 1e38, and float32 ends at 3.4e38


class UnusableVectorError(UserError):
    """Raised if row `row` of vectors cannot be compared; the message is `subject`, then `reason`."""

    def __init__(self, subject: str, row: int, reason: str):
        self.subject, self.row, self.reason = subject, row, reason
        super().__init__(f"{subject} {reason}")


def first_unusable(vectors: np.ndarray) -> tuple[int, str] | None:
    """Returns the first row of vectors [N, D] that cannot be compared, and why; None if all can."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)
    unusable = ~(squares <= LONGEST**2)  # also true for NaN
    if not unusable.any():
        return None
    row = int(np.argmax(unusable))
    if not np.isfinite(vectors[row]).all():
        return row, "has a number that is not finite"
    length = np.linalg.norm(vectors[row].astype(np.float64))
    return row, (
        f"has the norm {length:.3g} (at most {LONGEST:g}: scores of longer vectors do not fit into float32)"
    )
