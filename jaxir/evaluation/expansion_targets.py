"""Training targets of a GAR generator: a question's answer, or the sentence or title of a passage with it."""

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
    """A question (`id`, `source`) and the text that the generator should write for it (`target`)."""

    id: str
    source: str
    target: str


class TargetsReport(NamedTuple):
    """How many targets were written, and how many questions were read."""

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

    With kind "answer" the target is the question's first answer. With "sentence" and "title", the first of
    the question's `passages` (ids, best first) with an answer is used; the target is its first sentence with
    an answer, or its title. `answers_in` says for "title" where in a passage answers are searched for.
    """
    asked = list(read_queries(queries))
    questions = [query for query in asked if query.id in answers]
    found = list(_targets(kind, questions, answers, passages or {}, corpus, answers_in))
    if not found:
        raise UserError(
            f"{queries}: no question has a target: check that the files of questions, answers and passages"
            " use the same ids"
        )
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
    asked: dict[str, list[tuple[int, str]]] = {}  # passage id -> list of (rank, question id)
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
    """Returns the passage's sentence with an answer, or its title; None or "" if there is none."""
    if kind == "title":
        return document.title if own.finds(searched(document, answers_in)) else None
    return next(filter(own.finds, sentences_of(document.text)), None)
