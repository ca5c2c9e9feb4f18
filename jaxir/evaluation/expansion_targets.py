"""What a generator of GAR learns to write for a question: its answer, or a sentence or title with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxir.core.errors import UserError
from jaxir.data.formats.sources import Document, Query, read_queries, read_wanted
from jaxir.data.text.sentences import sentences_of
from jaxir.evaluation.answer_match import AnswerMatcher, AnswersIn, searched
from jaxir.retrieval.encoding.windowed_file import write_windows
from jaxir.storage import fingerprints
from jaxir.storage.files import local_path

Kind = Literal["answer", "sentence", "title"]


class Target(NamedTuple):
    """A question and what is to be written for it."""

    id: str
    source: str
    target: str


class TargetsReport(NamedTuple):
    """What was written: counts of targets, and of the questions that were read."""

    targets: int
    questions: int

    def __str__(self) -> str:
        without = self.questions - self.targets
        return f"{self.targets:,} targets" + (f"; {without:,} questions have none" if without else "")


def write_targets(
    kind: Kind,
    queries: str | Path,
    answers: Mapping[str, Sequence[str]],
    output: str | Path,
    *,
    passages: Mapping[str, Sequence[str]] | None = None,
    corpus: str | Path | None = None,
    answers_in: AnswersIn = "text",
) -> TargetsReport:
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
      answers_in: where in a passage an answer is looked for, if its title is the target.

    Raises:
      UserError: no question has a target, or the corpus lacks a passage.
    """
    asked = list(read_queries(queries))
    questions = [query for query in asked if query.id in answers]
    found = list(_targets(kind, questions, answers, passages or {}, corpus, answers_in))
    if not found:
        raise UserError(f"{queries}: no question has a target: do the files belong together?")
    write_windows(
        local_path(output, "written to"),
        {"targets": fingerprints.of_values(*found)},
        found,
        lambda batch, done: ({"source": t.source, "target": t.target, "outputs": [t.target]} for t in batch),
        count=len(found),
        what="writing targets",
    )
    return TargetsReport(len(found), len(asked))


def _targets(
    kind: Kind,
    questions: Sequence[Query],
    answers: Mapping[str, Sequence[str]],
    passages: Mapping[str, Sequence[str]],
    corpus: str | Path | None,
    answers_in: AnswersIn,
) -> Iterator[Target]:
    if kind == "answer":
        yield from (Target(query.id, query.text, answers[query.id][0]) for query in questions)
        return
    own = {query.id: AnswerMatcher(answers[query.id]) for query in questions}
    asked: dict[str, list[tuple[int, str]]] = {}  # of each passage: at which place of which question
    for query_id in own:
        for place, doc_id in enumerate(passages.get(query_id, ())):
            asked.setdefault(doc_id, []).append((place, query_id))
    best: dict[str, tuple[int, str]] = {}
    for document in read_wanted(corpus, asked, named_by="a question has"):
        for place, query_id in asked[document.id]:
            known = best.get(query_id)
            if (known is None or place < known[0]) and (
                target := _in(document, own[query_id], kind, answers_in)
            ):
                best[query_id] = place, target
    yield from (Target(query.id, query.text, best[query.id][1]) for query in questions if query.id in best)


def _in(document: Document, own: AnswerMatcher, kind: Kind, answers_in: AnswersIn) -> str | None:
    """Returns the target that a passage gives; None where it holds no answer, or has no title."""
    if kind == "title":
        return document.title if own.finds(searched(document, answers_in)) else None
    return next(filter(own.finds, sentences_of(document.text)), None)
