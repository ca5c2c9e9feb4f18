"""Finds the best of many scores of one query, in numpy."""

import numpy as np


def best_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """Returns at most k rows with the best scores other than 0, best first; the first row wins a tie."""
    rows = np.flatnonzero(scores)
    if len(rows) > k:
        of_rows = scores[rows]
        least = np.partition(of_rows, len(rows) - k)[len(rows) - k]
        above, ties = rows[of_rows > least], rows[of_rows == least]
        rows = np.sort(np.concatenate([above, ties[: k - len(above)]]))
    return rows[np.argsort(-scores[rows], kind="stable")]
