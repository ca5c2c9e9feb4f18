"""Judgements by string match, as in open-domain question answering: what holds an answer is right."""

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
# Where a document's answers are looked for: in its text, as Karpukhin et al. do, or in its title, too.
AnswersIn = Literal["text", "document"]


def tokens_of(text: str) -> list[str]:
    """Returns a text's words and signs as they are compared: in lower case, in Unicode's form NFD."""
    # Each by itself: Python makes a sigma lower by what stands beside it.
    return [token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text))]


def searched(document: Document, answers_in: AnswersIn) -> str:
    """Returns what of a document is searched for answers."""
    return document.text if answers_in == "text" else document.contents


class AnswerMatcher:
    """Looks for the answers of one question in texts, as runs of whole tokens (Karpukhin et al. 2020)."""

    def __init__(self, answers: Sequence[str]):
        self._answers = [joined_tokens(answer) for answer in answers if tokens_of(answer)]

    def finds(self, text: str) -> bool:
        """Whether a text holds one of them."""
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
    """Judges what the runs found: 1 where a document holds an answer of the query, 0 where it does not.

    Success@k against these judgements is the top-k accuracy of the papers on open-domain question answering.
    The corpus is read once, and of its texts none is kept.

    Args:
      runs: all the runs to be scored.
      answers: query id to answers; each of these queries counts, answered or not.
      corpus: corpus.jsonl[.gz].
      depth: how far down each run is judged.
      answers_in: where answers are looked for.

    Raises:
      UserError: the runs answer none of the queries, or name a document that the corpus lacks.
    """
    asked: dict[str, set[str]] = {}
    for run in runs:
        for query_id in answers.keys() & run.keys():
            for doc_id in rank(run[query_id])[:depth]:
                asked.setdefault(doc_id, set()).add(query_id)
    if not asked:
        raise UserError("the runs answer none of the queries that have answers: do they belong together?")
    matchers = {query_id: AnswerMatcher(texts) for query_id, texts in answers.items()}
    qrels: dict[str, dict[str, int]] = {query_id: {} for query_id in answers}

    for document in progress(read_corpus(corpus), what="looking for answers", unit="documents"):
        text = searched(document, answers_in)
        for query_id in asked.pop(document.id, ()):
            qrels[query_id][document.id] = int(matchers[query_id].finds(text))
    if asked:
        raise UserError(f"{corpus}: it lacks document {min(asked)!r} ({len(asked)} that the runs found)")
    return qrels


def joined_tokens(text: str) -> str:
    """Returns the tokens of a text between separators, so that part of a token is never found in another."""
    return "\x00".join(["", *tokens_of(text), ""])
