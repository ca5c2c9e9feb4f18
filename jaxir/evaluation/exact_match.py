"""Exact match and F1 of written answers, as in SQuAD's evaluation (Rajpurkar et al. 2016).

Readers for open-domain questions are judged by them (DPR, Fusion-in-Decoder, chuang2024's table 3.5).
"""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
import string
from collections.abc import Mapping, Sequence

from jaxir.core.errors import UserError

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """Returns a text in lower case, without ASCII punctuation, articles and superfluous space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(written: str, answers: Sequence[str]) -> float:
    """Returns 1 if the written text is one of the answers, after `normalized`, else 0."""
    return float(normalized(written) in map(normalized, answers))


def f1(written: str, answers: Sequence[str]) -> float:
    """Returns the F1 of the words of the written text, after `normalized`, for the best of the answers."""
    return max(_f1(normalized(written).split(), normalized(answer).split()) for answer in answers)


def _f1(written: list[str], answer: list[str]) -> float:
    common = (collections.Counter(written) & collections.Counter(answer)).total()
    return 2 * common / (len(written) + len(answer)) if common else 0.0


METRICS = {"EM": exact_match, "F1": f1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerScores:
    """Scores of written answers."""

    values: dict[str, float]  # EM and F1, means over all questions that have answers
    per_query: dict[str, dict[str, float]]  # metric to question to value, in the order of the answers
    queries: int  # questions with answers
    unanswered: int  # questions of these for which nothing was written; each counts 0
    unjudged: int  # written texts for questions without answers, which are ignored

    def describe(self) -> str:
        """Returns one line on the questions behind the values."""
        parts = [f"{self.queries} questions"]
        if self.unanswered:
            parts.append(f"{self.unanswered} of them without a written answer, which counts 0")
        if self.unjudged:
            parts.append(f"{self.unjudged} without answers ignored")
        return "; ".join(parts)


def score_answers(written: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> AnswerScores:
    """Scores the texts written for questions against the right answers; an empty text counts as none."""
    there = {query_id: text for query_id, text in written.items() if query_id in answers}
    if not there:
        raise UserError(
            "none of the written answers is for a question with answers: check that --predictions and"
            " --answers use the same question ids"
        )
    per_query = {
        name: {q: metric(text, right) if (text := there.get(q)) else 0.0 for q, right in answers.items()}
        for name, metric in METRICS.items()
    }
    return AnswerScores(
        values={name: statistics.fmean(values.values()) for name, values in per_query.items()},
        per_query=per_query,
        queries=len(answers),
        unanswered=sum(not there.get(q) for q in answers),
        unjudged=len(written) - len(there),
    )
