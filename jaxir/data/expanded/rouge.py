"""ROUGE-L of many pairs of short texts: the longest common subsequence of their words."""

from __future__ import annotations

import numpy as np

from jaxir.core.installation import require


class Words:
    """Converts texts to word numbers, from 1 on, with rouge-score's tokenizer without stemming.

    Words are runs of a to z and 0 to 9 in lower case, so text in other scripts has none.
    """

    def __init__(self):
        require("rouge", "rouge_score")
        from rouge_score.tokenize import tokenize

        self._tokenize = tokenize
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> np.ndarray:
        """Returns the word numbers of a text: int32 [n]."""
        found = self._tokenize(text, None)
        return np.array([self._numbers.setdefault(w, len(self._numbers) + 1) for w in found], np.int32)


def rouge_l(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the F-measure of ROUGE-L of P pairs of texts, as `rouge_score.rouge_scorer` does.

    With l the length of the longest common subsequence of texts of n and m words, precision is l / n and
    recall is l / m, so

        F = 2 l / (n + m)

    and F = 0 for two texts without words. All pairs are compared at once, because a loop is too slow.

    Args:
      one: int [P, N], word numbers of one text per pair; 0 is padding, on the right.
      other: int [P, M], word numbers of the other text per pair, in the same form.

    Returns:
      float64 [P].
    """
    ours, theirs = np.ascontiguousarray(one.T), np.ascontiguousarray(other.T)
    real = ours != 0
    # longest[i]: length of the longest common subsequence of the first i words of `ours` and the words of
    # `theirs` seen so far.
    longest = np.zeros((len(ours) + 1, ours.shape[1]), np.int32)
    for word in theirs:
        more = np.maximum(longest[1:], longest[:-1] + ((ours == word) & real))
        longest[1:] = np.maximum.accumulate(more, axis=0) if len(more) else more
    total = real.sum(axis=0) + (theirs != 0).sum(axis=0)
    return 2 * longest[-1] / np.maximum(total, 1)
