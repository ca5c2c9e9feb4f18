"""ROUGE-L of many pairs of short texts: how much of one's words the other has, in the same order."""

from __future__ import annotations

import numpy as np

from jaxir.core.installation import require


class Words:
    """Turns texts into numbers of words, from 1 on; words are those of the rouge-score package, unstemmed.

    They are runs of a to z and 0 to 9 in lower case: a text in another script has none.

    Raises:
      UserError: rouge-score is not installed.
    """

    def __init__(self):
        require("rouge", "rouge_score")
        from rouge_score.tokenize import tokenize

        self._tokenize = tokenize
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> np.ndarray:
        """Returns int32 [n], the words of a text."""
        found = self._tokenize(text, None)
        return np.array([self._numbers.setdefault(w, len(self._numbers) + 1) for w in found], np.int32)


def rouge_l(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the F-measure of ROUGE-L of P pairs of texts, as `rouge_score.rouge_scorer` has it.

    With l the length of the longest common subsequence of texts of n and m words, its precision is l / n and
    its recall l / m, so

        F = 2 l / (n + m)

    and 0 where a text has no words. All pairs are compared at once: one by one is too slow for training.

    Args:
      one: int [P, N], numbers of words; 0 is padding, on the right.
      other: int [P, M], likewise.

    Returns:
      float64 [P].
    """
    ours, theirs = np.ascontiguousarray(one.T), np.ascontiguousarray(other.T)
    real = ours != 0
    # longest[i]: of the first i words of ours, and of what has been read of theirs.
    longest = np.zeros((len(ours) + 1, ours.shape[1]), np.int32)
    for word in theirs:
        more = np.maximum(longest[1:], longest[:-1] + ((ours == word) & real))
        longest[1:] = np.maximum.accumulate(more, axis=0) if len(more) else more
    total = real.sum(axis=0) + (theirs != 0).sum(axis=0)
    return 2 * longest[-1] / np.maximum(total, 1)
