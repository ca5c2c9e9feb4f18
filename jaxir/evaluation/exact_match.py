"""Exact match and F1 of a reader's answers, as in SQuAD's evaluation (Rajpurkar et al. 2016).

DPR, Fusion-in-Decoder and Chuang 2024 (table 3.5) report these metrics for open-domain questions.
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
    """Returns a text in lower case, without ASCII punctuation, English articles and superfluous space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(written: str, answers: Sequence[str]) -> float:
    """Returns 1 if the predicted text equals one of the correct answers after `normalized`, else 0."""
    return float(normalized(written) in map(normalized, answers))


def f1(written: str, answers: Sequence[str]) -> float:
    """Returns the maximum over the correct answers of the F1 of words, after `normalized`."""
    return max(_f1(normalized(written).split(), normalized(answer).split()) for answer in answers)


def _f1(written: list[str], answer: list[str]) -> float:
    common = (collections.Counter(written) & collections.Counter(answer)).total()
    return 2 * common / (len(written) + len(answer)) if common else 0.0


METRICS = {"EM": exact_match, "F1": f1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerScores:
    """Scores of a reader's answers."""

    values: dict[str, float]  # EM and F1: means over all questions with correct answers
    per_query: dict[str, dict[str, float]]  # metric -> question id -> value
    queries: int  # number of questions with correct answers
    unanswered: int  # number of these questions for which the reader wrote nothing; each scores 0
    unjudged: int  # number of texts written for questions without correct answers; these are ignored

    def describe(self) -> str:
        """Returns one line that describes the scored questions, for a table's caption."""
        parts = [f"{self.queries} questions"]
        if self.unanswered:
            parts.append(f"{self.unanswered} of them without a predicted answer, which score 0")
        if self.unjudged:
            parts.append(f"{self.unjudged} other questions ignored, which have no correct answers")
        return "; ".join(parts)


def score_answers(written: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> AnswerScores:
    """Scores the texts written for questions against the correct answers; an empty text scores 0."""
    there = {query_id: text for query_id, text in written.items() if query_id in answers}
    if not there:
        raise UserError(
            "none of the predicted answers is for a question with correct answers: check that --predictions"
            " and --answers use the same question ids"
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
