"""MultiReQA (Guo et al. 2021): questions and the sentences that answer them.

Two files are needed. In the MRQA 2019 file (SQuAD.jsonl.gz ...) the first line is a header, and every other
line has a context with its questions. Answer spans are characters [start, end], both inclusive. MultiReQA's
file (candidates.json.gz) splits contexts into sentences. Its `candidate_id` is the data set's name, "_", the
ids of all questions of the context joined by "/", and a number. `response_start` and `response_end` are
characters, the end exclusive. (The released files show this format; the README omits most of it.)

A sentence is relevant to a question if a detected answer overlaps it. Questions with equal texts are one
question, with the first one's id. Moiseev et al. 2023 (table 4) also count distinct texts of test questions.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    as_object,
    json_object,
    list_field,
    needed_text,
    parsed_lines,
    string_field,
)
from jaxir.data.formats.sources import Document, PairExample, Query, text_id
from jaxir.data.sets.pair_sources import AnswerSource
from jaxir.data.sets.tfds_records import read_tfds

NO_ANSWER = "question without an answer sentence"


class Span(NamedTuple):
    """Positions of a text in its context, in characters: [start, end), the end exclusive."""

    start: int
    end: int


class Question(NamedTuple):
    id: str
    text: str
    answers: tuple[Span, ...]


class Sentence(NamedTuple):
    """A candidate answer: the sentence's id and its span in the context."""

    id: str
    span: Span


class Context(NamedTuple):
    """A text with its questions and, if MultiReQA has them, its sentences; `place` is (file, line)."""

    place: tuple[str, int]
    text: str
    questions: tuple[Question, ...]
    sentences: tuple[Sentence, ...]


class Boundaries:
    """The spans of the sentences in a candidates.json[.gz], by the question ids of their contexts."""

    def __init__(self, path: str, on_bad_input: OnBadInput):
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
                raise MalformedRecord("a sentence has a wrong span:", f"{span.start} to {span.end}")
            group = group_of_prefix.get(prefix)
            if group is None:
                if taken := [q for q in questions if q in self._group_of_question]:
                    raise MalformedRecord("a question id has two contexts:", repr(taken[0]))
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
        """Returns the sentences of a context in order; raises MalformedRecord if one ends beyond `text`."""
        groups = {self._group_of_question[q] for q in question_ids if q in self._group_of_question}
        found = [
            Sentence(f"{self._prefixes[group]}/_{suffix}", span)
            for group in groups
            for suffix, span in self._spans[group].items()
        ]
        last = max((sentence.span.end for sentence in found), default=0)
        if last > len(text):
            reason = "the sentence boundaries belong to another context: the last one is at character"
            raise MalformedRecord(reason, f"{last} of {len(text)}")
        return tuple(sorted(found, key=lambda sentence: sentence.span))


class _MultiReqa(AnswerSource):
    """(question, answer sentence) pairs made from contexts, which a subclass defines by `contexts`."""

    candidates: str
    with_context: bool

    @abc.abstractmethod
    def contexts(self, boundaries: Boundaries, on_bad_input: OnBadInput) -> Iterator[Context]:
        """Yields the contexts of the data set."""

    def judged(self, on_bad_input: OnBadInput) -> Iterator[tuple[Iterable[Document], list[PairExample]]]:
        """Yields for each context its sentences and its new (question, answer sentence) pairs.

        Contexts without their own sentences, which use the sentences of an equal context, come last.
        """
        boundaries = Boundaries(self.candidates, on_bad_input)
        questions = _Questions(on_bad_input)
        question_ids_of_text: dict[str, list[str]] = {}
        without: list[Context] = []

        def of(context: Context) -> tuple[Iterable[Document], list[PairExample]]:
            sentences = (Document(s.id, "", self._passage(context, s)) for s in context.sentences)
            pairs = [
                PairExample(*query, sentence.id, self._passage(context, sentence))
                for query, sentence in questions.answered(context)
            ]
            return sentences, pairs

        for context in self.contexts(boundaries, on_bad_input):
            if context.sentences:
                question_ids_of_text[text_id(context.text)] = [q.id for q in context.questions]
                yield of(context)
            else:
                without.append(context)
        for context in without:
            question_ids = question_ids_of_text.get(text_id(context.text), ())
            yield of(context._replace(sentences=boundaries.of(context.text, question_ids)))
        questions.report()

    def _passage(self, context: Context, sentence: Sentence) -> str:
        text = context.text[sentence.span.start : sentence.span.end]
        return f"{text} {context.text}" if self.with_context else text


class _Questions:
    """The questions read so far: equal texts are one question, and repeated pairs are dropped."""

    def __init__(self, on_bad_input: OnBadInput):
        self._on_bad_input = on_bad_input
        self._text_of_id: dict[str, str] = {}
        self._query_of_text: dict[str, Query] = {}
        self._pairs: set[tuple[str, str]] = set()
        self._places: dict[str, tuple[str, int]] = {}

    def answered(self, context: Context) -> Iterator[tuple[Query, Sentence]]:
        """Yields the (question, answer sentence) pairs of a context, without pairs yielded before."""
        for question in context.questions:
            if self._text_of_id.setdefault(question.id, question.text) != question.text:
                self._on_bad_input.record(*context.place, "a question id has two texts:", repr(question.id))
                continue
            query = self._query_of_text.setdefault(question.text, Query(question.id, question.text))
            self._places.setdefault(query.id, context.place)
            for sentence in context.sentences:
                pair = query.id, sentence.id
                if pair not in self._pairs and any(_overlap(sentence.span, a) for a in question.answers):
                    self._pairs.add(pair)
                    yield query, sentence

    def report(self) -> None:
        answered = {query_id for query_id, _ in self._pairs}
        for query_id, place in self._places.items():
            if query_id not in answered:
                self._on_bad_input.leave_out(*place, NO_ANSWER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiReqaPairs(_MultiReqa):
    """(question, answer sentence) pairs of one data set and split.

    Attributes:
      mrqa: file of MRQA with contexts and questions, such as train/SQuAD.jsonl.gz.
      candidates: file of MultiReQA with the sentences, such as data/train/SQuAD/candidates.json.gz.
      with_context: whether a passage is the sentence followed by its context, or only the sentence.
    """

    mrqa: str
    candidates: str
    with_context: bool = True

    def contexts(self, boundaries: Boundaries, on_bad_input: OnBadInput) -> Iterator[Context]:
        def parse(line: str, number: int) -> Context | None:
            record = json_object(line)
            if number == 1 and "header" in record:
                return None
            text = needed_text(record, "context")
            questions = tuple(_question(as_object(item, "qas")) for item in list_field(record, "qas"))
            sentences = boundaries.of(text, [q.id for q in questions])
            return Context((self.mrqa, number), text, questions, sentences)

        return parsed_lines(self.mrqa, parse, on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsMultiReqaPairs(_MultiReqa):
    """Like `MultiReqaPairs`, with the contexts and questions from TFDS.

    TFDS strips contexts, so sentence boundaries are wrong if a context starts with white space.

    Attributes:
      name: "mrqa/squad", "mrqa/natural_questions", "mrqa/trivia_qa", "mrqa/search_qa", ...
      split: TFDS's split: "train" or "validation".
      candidates: file of MultiReQA with the sentences, such as data/train/SQuAD/candidates.json.gz.
      data_dir: TFDS's data directory; None: TFDS's default.
      with_context: whether a passage is the sentence followed by its context, or only the sentence.
    """

    name: str
    split: str
    candidates: str
    data_dir: str | None = None
    with_context: bool = True

    def contexts(self, boundaries: Boundaries, on_bad_input: OnBadInput) -> Iterator[Context]:
        def parse(record: dict[str, Any], number: int) -> Context:
            text, spans = record["context"], record["detected_answers"]["char_spans"]
            answers = tuple(
                Span(start, end + 1)
                for starts, ends in zip(spans["start"], spans["end"], strict=True)
                for start, end in zip(starts, ends, strict=True)
            )
            question = Question(record["qid"], needed_text(record, "question").strip(), answers)
            place = f"{self.name}:{self.split}", number
            return Context(place, text, (question,), boundaries.of(text, [question.id]))

        return read_tfds(self.name, self.split, self.data_dir, parse, on_bad_input)


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
