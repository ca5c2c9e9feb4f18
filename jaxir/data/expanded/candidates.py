"""Expanded queries of questions, and what they found: lines that `jaxir.expand retrieve` and `rerank` write.

    {"_id": question id, "question": text, "outputs": [expansion, ...], "passages": [id or null, ...],
     "ranks": [number or null, ...], "depth": number}

`passages` are the first that each query finds, null where it finds none; `ranks`, where the answers are
known, those of the first that holds one, null where none of `depth` does. "" in `outputs` stands for the
question alone, as where nothing was written for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Record
from jaxir.core.values import Count, Natural, checked, fits
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.text_data import RecordSource
from jaxir.data.formats.expansions import read_expansions
from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    json_object,
    list_field,
    needed_text,
    parsed_lines,
    string_field,
)
from jaxir.data.formats.sources import Document, read_queries, read_wanted
from jaxir.data.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """A question and its expansions.

    Attributes:
      id: of the question.
      question: its text.
      outputs: the expansions, in their order; "" stands for none.
      passages: the id of the first passage that each query finds; None: nothing was searched.
      ranks: of the first passage that holds an answer; None: answers were not known.
      depth: how many passages were looked at; 0: none.
    """

    id: str
    question: str
    outputs: list[str]
    passages: list[str | None] | None = None
    ranks: list[int | None] | None = None
    depth: int = 0

    @property
    def queries(self) -> list[str]:
        """The expanded queries."""
        return [expanded(self.question, output) for output in self.outputs]

    def of(self, places: Sequence[int]) -> Candidates:
        """Returns those at these places, in this order."""

        def some(values: list[Any] | None) -> Any:
            return None if values is None else [values[place] for place in places]

        return dataclasses.replace(
            self, outputs=some(self.outputs), passages=some(self.passages), ranks=some(self.ranks)
        )

    def fields(self) -> dict[str, Any]:
        """Returns what a line holds beside the id."""
        return {n: value for n, value in dataclasses.asdict(self).items() if n != "id" and value is not None}


def expanded(question: str, expansion: str) -> str:
    """Returns "question ? expansion" (Chuang 2024, section 3.4.2), the question alone for no expansion.

    A question mark at the end of the question is that one.
    """
    if not expansion:
        return question
    return f"{question.strip().removesuffix('?').rstrip()} ? {expansion}"


def read_questions(
    queries: str | Path,
    expansions: Sequence[str | Path],
    *,
    lines_each: int = 1,
    limit: int | None = None,
    with_question: bool = False,
    on_bad_input: Policy = "stop",
) -> list[Candidates]:
    """Reads questions and their expansions, of each of which the repeated ones are left out.

    Args:
      queries: queries.jsonl[.gz].
      expansions: files or folders for `read_expansions`; a question has those of all.
      lines_each: see `read_expansions`.
      limit: keeps so many of a question, the first ones.
      with_question: whether the question alone comes after them, which it does where there are none.
      on_bad_input: "stop" at what is malformed, or "skip" it: the question is left as it is.
    """
    questions = {query.id: query.text for query in read_queries(queries, on_bad_input)}
    found: dict[str, dict[str, None]] = {query_id: {} for query_id in questions}
    for path in expansions:
        of_file = read_expansions(path, list(questions), lines_each=lines_each, on_bad_input=on_bad_input)
        for query_id, outputs in of_file:
            found[query_id] |= dict.fromkeys(output.strip() for output in outputs)
    outputs = {query_id: list(of_question)[:limit] for query_id, of_question in found.items()}
    alone = {query_id: [""] if with_question or not some else [] for query_id, some in outputs.items()}
    return [
        Candidates(id=query_id, question=text, outputs=outputs[query_id] + alone[query_id])
        for query_id, text in questions.items()
    ]


def read_candidates(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[Candidates]:
    """Yields the questions of a file; a malformed line or a second line of a question is a BadInputError."""
    seen: set[str] = set()

    def parse(line: str, _: int) -> Candidates:
        record = json_object(line)
        found = Candidates(
            id=string_field(record, "_id"),
            question=needed_text(record, "question"),
            outputs=list_field(record, "outputs"),
            passages=list_field(record, "passages") or None,
            ranks=list_field(record, "ranks") or None,
            depth=record.get("depth", 0),
        )
        right = fits(found.outputs, list[str]) and fits(found.passages, list[str | None] | None)
        right = right and fits(found.ranks, list[Count | None] | None) and fits(found.depth, Natural)
        if not found.outputs or not right:
            raise MalformedRecord("it is no line of candidates:", "lists of another type, or an empty one")
        if {len(x) for x in (found.passages, found.ranks) if x is not None} - {len(found.outputs)}:
            raise MalformedRecord("its lists are not equally long")
        if any(rank is not None and rank > found.depth for rank in found.ranks or ()):
            raise MalformedRecord("a rank below its depth")
        if found.id in seen:
            raise MalformedRecord("duplicate id", repr(found.id))
        seen.add(found.id)
        return found

    return parsed_lines(path, parse, on_bad_input)


def read_passages(
    corpus: str | Path, wanted: set[str], on_bad_input: OnBadInput | Policy = "stop"
) -> dict[str, Document]:
    """Reads passages by id; see `read_wanted`."""
    passages = read_wanted(corpus, wanted, on_bad_input, named_by="a query found")
    return {document.id: document for document in passages}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class QueryCandidates(RecordSource):
    """What a reranker of queries learns from: the fields `queries`, `ranks` and `passages`, lists.

    Attributes:
      path: a file of candidates, made with answers.
      corpus: corpus.jsonl[.gz] with the passages, for a retrieval-dependent reranker; None: they are empty.
      max_rank: the rank of a query that finds no answer, MAX_RANK; greater than the depth of the file.
      limit: how many of a question count, the first ones; None: all.
    """

    path: str
    corpus: str | None = None
    max_rank: Count = 101
    limit: Count | None = None

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> ArrayDataset:
        """Reads everything and tokenises it; see `check_corpus`."""
        reads = any(getattr(feature, "field", None) == "passages" for feature in features.values())
        check_corpus(self.corpus, reads=reads)
        return super().dataset(tokenizer, features, on_bad_input)

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        """Yields a record for each question."""
        wanted: set[str] = set()
        if self.corpus is not None:
            wanted.update(*map(passages_of, self.questions(OnBadInput("skip"))))
        texts = read_passages(self.corpus, wanted, on_bad_input) if wanted else {}
        for some in self.questions(on_bad_input):
            record = {
                "queries": [(f"{some.id}#{n}", query) for n, query in enumerate(some.queries)],
                "ranks": [self.max_rank if rank is None else rank for rank in some.ranks],
            }
            if self.corpus is not None:
                record["passages"] = [
                    ("", "") if p is None else (p, texts[p].contents) for p in some.passages
                ]
            yield record

    def questions(self, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[Candidates]:
        """Yields the questions, of their candidates those that count."""
        for some in read_candidates(self.path, on_bad_input):
            if some.ranks is None:
                raise UserError(f"{self.path}: it has no ranks to learn from: make it with --answers")
            if self.max_rank <= some.depth:
                raise UserError(
                    f"{self.path}: {some.depth} passages of a query were looked at, so the rank of those"
                    f" without an answer must be greater: max_rank is {self.max_rank}"
                )
            yield some.of(range(len(some.outputs))[: self.limit])


def check_corpus(corpus: str | Path | None, *, reads: bool) -> None:
    """Raises a UserError unless a corpus is given exactly if a reranker reads passages that queries find."""
    if reads and corpus is None:
        raise UserError("this reranker reads the first passage of each query: give the corpus it is in")
    if corpus is not None and not reads:
        raise UserError("this reranker reads queries alone, without passages: leave the corpus out")


def check_unexpanded(queries: str | Path) -> None:
    """Raises a UserError where the queries of a file are what `jaxir.expand rerank` or `choose` wrote."""
    for first in itertools.islice(parsed_lines(queries, lambda line, _: json_object(line), "stop"), 1):
        if "outputs" in first:
            raise UserError(
                f"{queries} has expanded queries, which are searched for: a reader reads the questions"
                " themselves, of which --run tells the passages"
            )


def passages_of(some: Candidates) -> set[str]:
    """Returns the ids of the first passages; raises a UserError where nothing was searched."""
    if some.passages is None:
        raise UserError("what the queries find is not known: jaxir.expand retrieve finds it")
    return {passage for passage in some.passages if passage is not None}
