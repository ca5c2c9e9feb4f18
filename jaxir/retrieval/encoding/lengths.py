"""Which vectors can be compared: finite ones whose inner products fit into float32."""

from __future__ import annotations

import numpy as np

from jaxir.core.errors import UserError

LONGEST = 1e19  # the inner product of two vectors of this length is 1e38; float32 ends at 3.4e38


class UnusableVectorError(UserError):
    """Row `row` of the checked vectors cannot be compared; the message is `subject` and `reason`."""

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
        f"is {length:.3g} long (at most {LONGEST:g}: scores of longer vectors do not fit into float32)"
    )
