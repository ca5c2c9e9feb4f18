"""What a generator of GAR learns to write for a question: its answer, or a sentence or title with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxir.data import fingerprints
from jaxir.data.candidates import read_passages
from jaxir.data.sentences import sentences_of
from jaxir.data.sources import Document, Query, read_queries
from jaxir.errors import UserError
from jaxir.evaluation.answers import joined_tokens, tokens_of
from jaxir.files import local_path
from jaxir.retrieval.encoding.windowed_file import OutputsReport, write_windows

Kind = Literal["answer", "sentence", "title"]


class Target(NamedTuple):
    """A question and what is to be written for it."""

    id: str
    source: str
    target: str


def write_targets(
    kind: Kind,
    queries: str | Path,
    answers: Mapping[str, Sequence[str]],
    output: str | Path,
    *,
    passages: Mapping[str, Sequence[str]] | None = None,
    corpus: str | Path | None = None,
) -> OutputsReport | None:
    """Writes {"_id", "source", "target", "outputs"} for each question that has a target (Mao et al. 2021).

    The answer is a question's first; the sentence the first one with an answer, of the first of its passages
    that holds one; the title that passage's.

    Args:
      kind: of target.
      queries: the questions, queries.jsonl[.gz].
      answers: question id to answers.
      output: the file, which appears only when whole.
      passages: question id to ids of passages, best first; for a sentence or a title.
      corpus: corpus.jsonl[.gz] with them.

    Raises:
      UserError: no question has a target, or the corpus lacks a passage.
    """
    questions = [query for query in read_queries(queries) if query.id in answers]
    found = list(_targets(kind, questions, answers, passages or {}, corpus))
    if not found:
        raise UserError(f"{queries}: no question has a target: do the files belong together?")
    return write_windows(
        local_path(output, "written to"),
        {"targets": fingerprints.of_values(*found)},
        found,
        lambda batch, done: ({"source": t.source, "target": t.target, "outputs": [t.target]} for t in batch),
        count=len(found),
        what="writing targets",
    )


def _targets(
    kind: Kind,
    questions: Sequence[Query],
    answers: Mapping[str, Sequence[str]],
    passages: Mapping[str, Sequence[str]],
    corpus: str | Path | None,
) -> Iterator[Target]:
    if kind == "answer":
        yield from (Target(query.id, query.text, answers[query.id][0]) for query in questions)
        return
    wanted = {doc_id for query in questions for doc_id in passages.get(query.id, ())}
    texts = read_passages(corpus, wanted)
    for query in questions:
        own = [joined_tokens(answer) for answer in answers[query.id] if tokens_of(answer)]
        of_passages = (_in(texts[doc_id], own, kind) for doc_id in passages.get(query.id, ()))
        if target := next(filter(None, of_passages), None):
            yield Target(query.id, query.text, target)


def _in(document: Document, answers: Sequence[str], kind: Kind) -> str | None:
    """Returns the target that a passage gives; None where it holds no answer, or has no title."""

    def holds(text: str) -> bool:
        joined = joined_tokens(text)
        return any(answer in joined for answer in answers)

    if kind == "title":
        return document.title if holds(document.contents) else None
    return next(filter(holds, sentences_of(document.text)), None)
