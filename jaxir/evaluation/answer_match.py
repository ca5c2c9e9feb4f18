"""Judgements by string match, as in open-domain question answering: a document with an answer is relevant."""

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

# Runs of letters, digits and marks, and every other visible character by itself.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
# Search a document's text for answers, as Karpukhin et al. do, or its title too.
AnswersIn = Literal["text", "document"]


def tokens_of(text: str) -> list[str]:
    """Returns a text's words and symbols for comparison: in lower case, in Unicode's form NFD."""
    # Each token alone: Python's lower case of a sigma depends on its neighbours.
    return [token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text))]


def searched(document: Document, answers_in: AnswersIn) -> str:
    """Returns the part of a document that is searched for answers."""
    return document.text if answers_in == "text" else document.contents


class AnswerMatcher:
    """Finds the answers of one question in texts, as runs of whole tokens (Karpukhin et al. 2020)."""

    def __init__(self, answers: Sequence[str]):
        self._answers = [joined_tokens(answer) for answer in answers if tokens_of(answer)]

    def finds(self, text: str) -> bool:
        """Returns whether a text contains one of the answers."""
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
    """Judges the first `depth` documents of runs: 1 if a document contains an answer of its query, else 0.

    Success@k against these judgements is the top-k accuracy of the papers on open-domain question answering.
    Each query in `answers` counts, whether or not the runs answer it. The corpus is read once and not kept.
    """
    asked: dict[str, set[str]] = {}
    for run in runs:
        for query_id in answers.keys() & run.keys():
            for doc_id in rank(run[query_id])[:depth]:
                asked.setdefault(doc_id, set()).add(query_id)
    if not asked:
        raise UserError(
            "the runs answer none of the queries that have answers: check that --run and --answers use the"
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
    """Returns the tokens of a text between separators, so that only whole tokens match."""
    return "\x00".join(["", *tokens_of(text), ""])
