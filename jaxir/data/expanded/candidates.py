"""Expanded queries of questions and the passages they find: files of `jaxir.expand retrieve` and `rerank`.

    {"_id": question id, "question": text, "outputs": [expansion, ...], "passages": [id or null, ...],
     "ranks": [number or null, ...], "depth": number}

`passages` has the first passage that each query finds, or null. `ranks`, which needs answers, has the rank of
each query's first passage with an answer, or null if none of `depth` passages has one. The output "" is the
question without an expansion.
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
    """A question, its expansions and what each expanded query finds.

    Attributes:
      id: id of the question.
      question: text of the question.
      outputs: the expansions, in order; "" stands for the question without expansion.
      passages: id of the first passage that each query finds; None if nothing was searched.
      ranks: rank of each query's first passage with an answer, or None; None if answers were unknown.
      depth: number of passages per query that were searched for answers; 0 if answers were unknown.
    """

    id: str
    question: str
    outputs: list[str]
    passages: list[str | None] | None = None
    ranks: list[int | None] | None = None
    depth: int = 0

    @property
    def queries(self) -> list[str]:
        return [expanded(self.question, output) for output in self.outputs]

    def of(self, places: Sequence[int]) -> Candidates:
        def some(values: list[Any] | None) -> Any:
            return None if values is None else [values[place] for place in places]

        return dataclasses.replace(
            self, outputs=some(self.outputs), passages=some(self.passages), ranks=some(self.ranks)
        )

    def fields(self) -> dict[str, Any]:
        return {n: value for n, value in dataclasses.asdict(self).items() if n != "id" and value is not None}


def expanded(question: str, expansion: str) -> str:
    """Returns "question ? expansion" (Chuang 2024, section 3.4.2), or only the question for an expansion "".

    A question mark at the end of the question is not repeated.
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
    """Reads questions, and the first `limit` distinct expansions of each.

    With `with_question`, the last candidate is the question without expansion; questions without expansions
    always have this candidate. If malformed lines are skipped, their questions lack those expansions.
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
        valid = fits(found.outputs, list[str]) and fits(found.passages, list[str | None] | None)
        valid = valid and fits(found.ranks, list[Count | None] | None) and fits(found.depth, Natural)
        if not found.outputs or not valid:
            raise MalformedRecord("not a line of candidates:", "a list is empty or has items of another type")
        if {len(x) for x in (found.passages, found.ranks) if x is not None} - {len(found.outputs)}:
            raise MalformedRecord("the lists 'outputs', 'passages' and 'ranks' have different lengths")
        if any(rank is not None and rank > found.depth for rank in found.ranks or ()):
            raise MalformedRecord("a rank exceeds 'depth'")
        if found.id in seen:
            raise MalformedRecord("duplicate id", repr(found.id))
        seen.add(found.id)
        return found

    return parsed_lines(path, parse, on_bad_input)


def read_passages(
    corpus: str | Path, wanted: set[str], on_bad_input: OnBadInput | Policy = "stop"
) -> dict[str, Document]:
    passages = read_wanted(corpus, wanted, on_bad_input, named_by="a query found")
    return {document.id: document for document in passages}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class QueryCandidates(RecordSource):
    """Training data of a query reranker, with the list fields `queries`, `ranks` and `passages`.

    Attributes:
      path: a file that `jaxir.expand retrieve --answers=FILE` wrote.
      corpus: corpus.jsonl[.gz] with the passages, for a reranker that reads passages; else None.
      max_rank: rank given to queries that find no answer (MAX_RANK); it must exceed the file's depth.
      limit: maximum number of candidates per question; the first ones are used; None: all.
    """

    path: str
    corpus: str | None = None
    max_rank: Count = 101
    limit: Count | None = None

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> ArrayDataset:
        reads = any(getattr(feature, "field", None) == "passages" for feature in features.values())
        check_corpus(self.corpus, reads=reads)
        return super().dataset(tokenizer, features, on_bad_input)

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
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
        """Yields the questions with at most `limit` candidates."""
        for some in read_candidates(self.path, on_bad_input):
            if some.ranks is None:
                raise UserError(
                    f"{self.path} has no ranks, which training needs: recreate it with"
                    " jaxir.expand retrieve --answers=FILE"
                )
            if self.max_rank <= some.depth:
                raise UserError(
                    f"{self.path}: max_rank, the rank of queries that find no answer, is {self.max_rank}, but"
                    f" must exceed the depth {some.depth}: set a larger MAX_RANK"
                )
            yield some.of(range(len(some.outputs))[: self.limit])


def check_corpus(corpus: str | Path | None, *, reads: bool) -> None:
    """Raises UserError if a reranker that reads passages has no corpus, or another reranker has one."""
    if reads and corpus is None:
        raise UserError(
            "this reranker also reads the first passage that each query finds: give --corpus=corpus.jsonl"
        )
    if corpus is not None and not reads:
        raise UserError("this reranker reads only queries, no passages: leave --corpus out")


def check_unexpanded(queries: str | Path) -> None:
    """Raises UserError for a file of expanded queries that `jaxir.expand rerank` or `choose` wrote."""
    for first in itertools.islice(parsed_lines(queries, lambda line, _: json_object(line), "stop"), 1):
        if "outputs" in first:
            raise UserError(
                f"{queries} has expanded queries, but a reader needs the original questions: give the file of"
                " questions, and with --run the run of the expanded queries"
            )


def passages_of(some: Candidates) -> set[str]:
    """Returns the ids of the first passages; raises UserError if the candidates have no passages."""
    if some.passages is None:
        raise UserError("the candidates have no passages: add them with jaxir.expand retrieve")
    return {passage for passage in some.passages if passage is not None}
