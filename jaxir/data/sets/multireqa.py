"""MultiReQA (Guo et al. 2021): from a question to the sentence that answers it.

It comes in two files that belong together. The MRQA 2019 file (SQuAD.jsonl.gz ...) has a header in its first
line, then a context and its questions in each; spans of answers are characters [start, end], both inclusive.
MultiReQA's file (candidates.json.gz) cuts contexts into sentences: its `candidate_id` is the data set's name,
"_", the ids of all questions of the context joined by "/", and a number; `response_start` and `response_end`
are characters, the end exclusive. (Seen in the released files; the README says less.)

A sentence is relevant to a question where a detected answer overlaps it. Questions with the same words are
one question, with the id of the first: the numbers of test questions that Moiseev et al. 2023 (table 4) give
are those of distinct texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    as_object,
    json_object,
    list_field,
    needed_text,
    parsed_lines,
    string_field,
)
from jaxir.data.formats.sources import Document, PairExample, Qrel, Query, text_id
from jaxir.data.sets.pair_sources import PairSource
from jaxir.data.sets.tfds_records import read_tfds

NO_ANSWER = "question without an answer sentence"


class Span(NamedTuple):
    """Characters [start, end) of a context."""

    start: int
    end: int


class Question(NamedTuple):
    """A question of a context, and where answers were found in it."""

    id: str
    text: str
    answers: tuple[Span, ...]


class Sentence(NamedTuple):
    """A candidate answer: its id and its place in the context."""

    id: str
    span: Span


class Context(NamedTuple):
    """A text with questions and, where MultiReQA has them, its sentences; `line` says where it was read."""

    line: int
    text: str
    questions: tuple[Question, ...]
    sentences: tuple[Sentence, ...]


class Boundaries:
    """The sentences of a candidates.json[.gz], found by the id of any question of their context.

    Raises:
      BadInputError: a malformed line, or a candidate id seen before.
    """

    def __init__(self, path: str | Path, on_bad_input: OnBadInput | Policy = "stop"):
        self._prefixes: list[str] = []
        self._spans: list[dict[str, Span]] = []
        self._group_of_question: dict[str, int] = {}
        group_of_prefix: dict[str, int] = {}

        def parse(line: str, number: int) -> bool:
            record = json_object(line)
            identifier = string_field(record, "candidate_id")
            prefix, separator, suffix = identifier.rpartition("/_")
            questions = prefix.partition("_")[2].split("/")
            if not separator or not suffix or not all(questions):
                raise MalformedRecord("candidate_id is not NAME_QUESTION/.../_NUMBER:", f"{identifier!r:.80}")
            span = Span(_integer(record, "response_start"), _integer(record, "response_end"))
            if not 0 <= span.start < span.end:
                raise MalformedRecord("a sentence must end after it starts:", f"{span.start} to {span.end}")
            group = group_of_prefix.get(prefix)
            if group is None:
                if taken := [q for q in questions if q in self._group_of_question]:
                    raise MalformedRecord("a question id stands for two contexts:", repr(taken[0]))
                group = group_of_prefix[prefix] = len(self._spans)
                self._group_of_question |= dict.fromkeys(questions, group)
                self._prefixes.append(prefix)
                self._spans.append({})
            if suffix in self._spans[group]:
                raise MalformedRecord("duplicate candidate_id:", f"{identifier!r:.80}")
            self._spans[group][suffix] = span
            return True

        for _ in parsed_lines(path, parse, on_bad_input):
            pass

    def of(self, text: str, question_ids: Iterable[str]) -> tuple[Sentence, ...]:
        """Returns the sentences of a context in their order; none where the file has none.

        Raises:
          MalformedRecord: they lie beyond the context's end.
        """
        groups = {self._group_of_question[q] for q in question_ids if q in self._group_of_question}
        found = [
            Sentence(f"{self._prefixes[group]}/_{suffix}", span)
            for group in groups
            for suffix, span in self._spans[group].items()
        ]
        last = max((sentence.span.end for sentence in found), default=0)
        if last > len(text):
            reason = "the sentence boundaries are of another context: the last one is at character"
            raise MalformedRecord(reason, f"{last} of {len(text)}")
        return tuple(sorted(found, key=lambda sentence: sentence.span))


def read_mrqa(
    path: str | Path, boundaries: Boundaries, on_bad_input: OnBadInput | Policy = "stop"
) -> Iterator[Context]:
    """Yields the contexts of an MRQA file (.jsonl[.gz])."""

    def parse(line: str, number: int) -> Context | None:
        record = json_object(line)
        if number == 1 and "header" in record:
            return None
        text = needed_text(record, "context")
        questions = tuple(_question(as_object(item, "qas")) for item in list_field(record, "qas"))
        return Context(number, text, questions, boundaries.of(text, [q.id for q in questions]))

    return parsed_lines(path, parse, on_bad_input)


def read_tfds_mrqa(
    name: str,
    split: str,
    data_dir: str | None,
    boundaries: Boundaries,
    on_bad_input: OnBadInput | Policy = "stop",
) -> Iterator[Context]:
    """Yields the contexts of TFDS's "mrqa/squad" and the like, one for each question."""

    def parse(record: dict[str, Any], number: int) -> Context:
        text, spans = record["context"], record["detected_answers"]["char_spans"]
        answers = tuple(
            Span(start, end + 1)
            for starts, ends in zip(spans["start"], spans["end"], strict=True)
            for start, end in zip(starts, ends, strict=True)
        )
        question = Question(record["qid"], needed_text(record, "question").strip(), answers)
        return Context(number, text, (question,), boundaries.of(text, [question.id]))

    return read_tfds(name, split, data_dir, parse, on_bad_input)


class Answers:
    """Contexts as (question, answer sentence) pairs, and as a collection to search in.

    Args:
      contexts: the contexts, read once.
      boundaries: where their sentences came from.
      where: what they are read from, for messages.
      with_context: whether a passage is the sentence followed by its whole context, or the sentence alone.
      on_bad_input: counts the questions that have no answer sentence.
    """

    def __init__(
        self,
        contexts: Iterable[Context],
        boundaries: Boundaries,
        where: str,
        *,
        with_context: bool,
        on_bad_input: OnBadInput,
    ):
        self._contexts, self._boundaries, self._where = contexts, boundaries, where
        self._with_context, self._on_bad_input = with_context, on_bad_input

    def pairs(self) -> Iterator[PairExample]:
        """Yields each (question, answer sentence) pair once."""
        for context, judged in self._judged():
            for query, sentence in judged:
                yield PairExample(query.id, query.text, sentence.id, self._passage(context, sentence))

    def collection(self) -> tuple[Iterator[Document], list[Query], list[Qrel]]:
        """Returns the sentences, the questions that one answers, and the judgements.

        The two lists fill up while the sentences are read, and are complete after the last.
        """
        queries: dict[str, Query] = {}
        qrels: list[Qrel] = []
        listed: list[Query] = []

        def documents() -> Iterator[Document]:
            written: set[str] = set()
            for context, judged in self._judged():
                for sentence in context.sentences:
                    if sentence.id not in written:
                        written.add(sentence.id)
                        yield Document(sentence.id, "", self._passage(context, sentence))
                queries.update({query.id: query for query, _ in judged})
                qrels.extend(Qrel(query.id, sentence.id, 1) for query, sentence in judged)
            listed.extend(queries.values())

        return documents(), listed, qrels

    def _judged(self) -> Iterator[tuple[Context, list[tuple[Query, Sentence]]]]:
        """Yields contexts, each with what is relevant in it to its questions and was not so before.

        A context whose sentences MultiReQA has under another question only, with the same text, comes last.
        """
        question_ids_of_text: dict[str, list[str]] = {}
        query_of_text: dict[str, Query] = {}
        text_of_id: dict[str, str] = {}
        answered: set[str] = set()
        pairs: set[tuple[str, str]] = set()
        unanswered: dict[str, int] = {}
        without: list[Context] = []

        def judge(context: Context) -> list[tuple[Query, Sentence]]:
            judged = []
            for question in context.questions:
                if text_of_id.setdefault(question.id, question.text) != question.text:
                    fault = "a question id stands for two questions:", repr(question.id)
                    self._on_bad_input.record(self._where, context.line, *fault)
                    continue
                query = query_of_text.setdefault(question.text, Query(question.id, question.text))
                for sentence in context.sentences:
                    relevant = any(_overlap(sentence.span, answer) for answer in question.answers)
                    if relevant and (query.id, sentence.id) not in pairs:
                        pairs.add((query.id, sentence.id))
                        judged.append((query, sentence))
                    if relevant:
                        answered.add(query.id)
                unanswered.setdefault(query.id, context.line)
            return judged

        for context in self._contexts:
            if context.sentences:
                question_ids_of_text[text_id(context.text)] = [q.id for q in context.questions]
                yield context, judge(context)
            else:
                without.append(context)
        for context in without:
            question_ids = question_ids_of_text.get(text_id(context.text), ())
            found = context._replace(sentences=self._boundaries.of(context.text, question_ids))
            yield found, judge(found)
        for query_id, line in unanswered.items():
            if query_id not in answered:
                self._on_bad_input.leave_out(self._where, line, NO_ANSWER)

    def _passage(self, context: Context, sentence: Sentence) -> str:
        text = context.text[sentence.span.start : sentence.span.end]
        return f"{text} {context.text}" if self._with_context else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiReqaPairs(PairSource):
    """(question, answer sentence) pairs of one data set and split.

    Attributes:
      mrqa: the MRQA file, such as train/SQuAD.jsonl.gz.
      candidates: MultiReQA's sentences of it, such as data/train/SQuAD/candidates.json.gz.
      with_context: whether a passage is the sentence followed by its whole context, or the sentence alone.
    """

    mrqa: str
    candidates: str
    with_context: bool = True

    def answers(self, on_bad_input: OnBadInput) -> Answers:
        """Reads the boundaries; the contexts are read as they are asked for."""
        boundaries = Boundaries(self.candidates, on_bad_input)
        contexts = read_mrqa(self.mrqa, boundaries, on_bad_input)
        how = {"with_context": self.with_context, "on_bad_input": on_bad_input}
        return Answers(contexts, boundaries, self.mrqa, **how)

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pairs."""
        return self.answers(on_bad_input).pairs()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsMultiReqaPairs(PairSource):
    """The same, with the contexts from TFDS.

    TFDS drops white space at a context's ends: boundaries are off where a context starts with some.

    Attributes:
      name: "mrqa/squad", "mrqa/natural_questions", "mrqa/trivia_qa", "mrqa/search_qa", ...
      split: TFDS's split: "train" or "validation".
      candidates: MultiReQA's sentences, such as data/train/SQuAD/candidates.json.gz.
      data_dir: where TFDS keeps its data sets; its default if None.
      with_context: as in `MultiReqaPairs`.
    """

    name: str
    split: str
    candidates: str
    data_dir: str | None = None
    with_context: bool = True

    def answers(self, on_bad_input: OnBadInput) -> Answers:
        """Reads the boundaries; the contexts are read as they are asked for."""
        boundaries = Boundaries(self.candidates, on_bad_input)
        contexts = read_tfds_mrqa(self.name, self.split, self.data_dir, boundaries, on_bad_input)
        how = {"with_context": self.with_context, "on_bad_input": on_bad_input}
        return Answers(contexts, boundaries, f"{self.name}:{self.split}", **how)

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pairs."""
        return self.answers(on_bad_input).pairs()


def _question(record: dict[str, Any]) -> Question:
    answers = []
    for answer in list_field(record, "detected_answers"):
        for span in list_field(as_object(answer, "detected_answers"), "char_spans"):
            if not (isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)):
                raise MalformedRecord("an item of 'char_spans' is not [start, end]:", f"{span!r:.40}")
            answers.append(Span(span[0], span[1] + 1))
    return Question(string_field(record, "qid"), needed_text(record, "question").strip(), tuple(answers))


def _integer(record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int:
        raise MalformedRecord(f"field {name!r} is not an integer:", f"{value!r:.40}")
    return value


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.end and b.start < a.end
