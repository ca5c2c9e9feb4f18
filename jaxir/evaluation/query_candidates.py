"""Searches with the expanded queries of questions, and finds the first passage with an answer (EAR)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.data.expanded.candidates import Candidates
from jaxir.evaluation.answer_match import AnswerMatcher, AnswersIn, searched
from jaxir.retrieval.encoding.windowed_file import OutputsReport, write_windows
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.searcher import Searcher
from jaxir.storage import fingerprints
from jaxir.storage.files import local_path
from jaxir.storage.open_files import sha256_of

WINDOW = 64  # number of questions searched in one batch; each has about 50 expanded queries


class Retriever:
    """Searches an index with expanded queries, and looks for answers in the first `depth` passages.

    If the index has vectors, the model that made it encodes the queries. If `answers` is None, only the first
    passage of each query is retrieved.
    """

    def __init__(
        self,
        index: str | Path,
        *,
        depth: int,
        answers: Mapping[str, Sequence[str]] | None,
        answers_in: AnswersIn = "text",
    ):
        self.directory, self.depth, self._answers_in = local_path(index), depth, answers_in
        loaded = load_index(self.directory)
        if answers is not None and loaded.documents is None:
            raise UserError(f"{index} stores no texts to find answers in: build it again with --corpus")
        self._searcher, self._answers = Searcher.open(loaded), answers

    def found(self, questions: Sequence[Candidates], done: Callable[[int], Any]) -> Iterator[Candidates]:
        """Yields each question with the results of its expanded queries; all are searched in one batch."""
        queries = [some.queries for some in questions]
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(queries)))
        depth = 1 if self._answers is None else self.depth
        _, ids = self._searcher.search(distinct, depth)
        ids_of = dict(zip(distinct, ids, strict=True))
        for some, of_question in zip(questions, queries, strict=True):
            yield self._one(some, [ids_of[query] for query in of_question])
            done(1)

    def _one(self, some: Candidates, found: list[list[str]]) -> Candidates:
        results: dict[str, Any] = {"passages": [ids[0] if ids else None for ids in found]}
        if self._answers is not None:
            results |= {"ranks": self._ranks(self._answers[some.id], found), "depth": self.depth}
        return Candidates(id=some.id, question=some.question, outputs=some.outputs, **results)

    def _ranks(self, answers: Sequence[str], found: list[list[str]]) -> list[int | None]:
        matcher, documents = AnswerMatcher(answers), self._searcher.index.documents

        @functools.cache
        def right(passage: str) -> bool:
            return matcher.finds(searched(documents[passage], self._answers_in))

        return [next((rank for rank, p in enumerate(ids, 1) if right(p)), None) for ids in found]

    @property
    def made_by(self) -> dict[str, Any]:
        """Fingerprints of what the results depend on, except the questions: index, answers and settings."""
        sums = self.directory / "SHA256SUMS"
        answers = self._answers and fingerprints.of_values(sorted(map(str, self._answers.items())))
        index = sha256_of(sums if sums.exists() else self.directory / "index.json")
        where = {} if answers is None else {"answers_in": self._answers_in}
        return {"index": index, "answers": answers, "depth": self.depth, **where}


def check_answers(questions: Sequence[Candidates], answers: Mapping[str, Sequence[str]], path: str) -> None:
    """Raises a UserError if a question has no answers in the file `path`."""
    if lacking := [some.id for some in questions if some.id not in answers]:
        raise UserError(
            f"{path}: {len(lacking):,} of {len(questions):,} questions lack answers, such as {lacking[0]!r}:"
            " give a file of answers with the same question ids"
        )


def write_found(
    retriever: Retriever, questions: Sequence[Candidates], output: str | Path, *, window: int = WINDOW
) -> OutputsReport | None:
    """Writes a file of candidates (`jaxir.data.expanded.candidates`); searches `window` questions at a time.

    After an interruption a repeated call resumes. Several processes of one run share the work, and only the
    first process returns the report.
    """
    return write_windows(
        local_path(output, "written to"),
        {**retriever.made_by, "questions": fingerprints.of_values(*map(str, questions)), "window": window},
        questions,
        lambda batch, done: (some.fields() for some in retriever.found(batch, done)),
        count=len(questions),
        what="retrieving",
        window=window,
    )
