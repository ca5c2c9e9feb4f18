"""Relevance judgements by string match, as in open-domain QA: a document with an answer is relevant."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import regex

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.data.formats.sources import Document, read_corpus
from jaxir.retrieval.ranking.runs import Run, rank

# A token is a run of letters, digits and marks, or any other single visible character.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
# Where answers are searched for: in a document's text, as in DPR (Karpukhin et al. 2020), or title and text.
AnswersIn = Literal["text", "document"]


def tokens_of(text: str) -> list[str]:
    """Returns the words and symbols of a text in lower case and in Unicode's form NFD."""
    # Lower-case each token separately, because Python's lower case of a sigma depends on its neighbours.
    return [token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text))]


def searched(document: Document, answers_in: AnswersIn) -> str:
    """Returns the part of a document that is searched for answers: its text, or its title and text."""
    return document.text if answers_in == "text" else document.contents


class AnswerMatcher:
    """Finds a question's answers in texts, each as a sequence of full tokens (Karpukhin et al. 2020)."""

    def __init__(self, answers: Sequence[str]):
        self._answers = [joined_tokens(answer) for answer in answers if tokens_of(answer)]

    def finds(self, text: str) -> bool:
        """Returns whether `text` contains at least one of the answers."""
        joined = joined_tokens(text)
        return any(answer in joined for answer in self._answers)


def judge_by_answers(
    runs: Sequence[Run],
    answers: Mapping[str, Sequence[str]],
    corpus: str | Path,
    *,
    depth: int,
    answers_in: AnswersIn = "text",
) -> dict[str, dict[str, int]]:
    """Judges the first `depth` documents of each run: 1 if a document contains the query's answer, else 0.

    Success@k with these judgements is the top-k accuracy of papers on open-domain question answering. The
    result has every query of `answers`, also those without results. The corpus is read once and not kept.
    """
    asked: dict[str, set[str]] = {}
    for run in runs:
        for query_id in answers.keys() & run.keys():
            for doc_id in rank(run[query_id])[:depth]:
                asked.setdefault(doc_id, set()).add(query_id)
    if not asked:
        raise UserError(
            "the runs have no results for any query with answers: check that --run and --answers use the"
            " same query ids"
        )
    matchers = {query_id: AnswerMatcher(texts) for query_id, texts in answers.items()}
    qrels: dict[str, dict[str, int]] = {query_id: {} for query_id in answers}

    for document in progress(read_corpus(corpus), what="finding answers", unit="documents"):
        text = searched(document, answers_in)
        for query_id in asked.pop(document.id, ()):
            qrels[query_id][document.id] = int(matchers[query_id].finds(text))
    if asked:
        raise UserError(
            f"{corpus}: {len(asked)} documents of the runs are missing, such as {min(asked)!r}: give the"
            " corpus that was searched"
        )
    return qrels


def joined_tokens(text: str) -> str:
    """Returns the tokens of a text between separators, so that a substring search only finds full tokens."""
    return "\x00".join(["", *tokens_of(text), ""])
