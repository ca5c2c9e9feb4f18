"""Reads Natural Questions (Kwiatkowski et al. 2019): questions and long answers (paragraphs, tables, lists).

The sources are the simplified files (v1.0-simplified_simplified-nq-train.jsonl.gz with `document_text`,
v1.0-simplified_nq-dev-all.jsonl.gz with `document_tokens`) or TFDS's "natural_questions/default". Moiseev et
al. 2023 use another version of NQ, MultiReQA's (`multireqa`). DPR has a third version (`dpr`).
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
from jaxir.data.formats.sources import Document, PairExample, Query, new_id, text_id
from jaxir.data.sets.pair_sources import AnswerSource
from jaxir.data.sets.tfds_records import read_tfds

NO_ANSWER = "question without a long answer"


class Example(NamedTuple):
    """A question about a page.

    Attributes:
      place: the file (or TFDS's data set and split) and the line of the question.
      query: the question.
      answers: the distinct long answers that annotators chose; may be empty.
      candidates: possible answers: the page's top-level paragraphs, tables and lists.
    """

    place: tuple[str, int]
    query: Query
    answers: tuple[Document, ...]
    candidates: tuple[Document, ...]


class _NaturalQuestions(AnswerSource):
    """(question, long answer) pairs. A subclass defines `questions`."""

    @abc.abstractmethod
    def questions(self, on_bad_input: OnBadInput) -> Iterator[Example]:
        """Yields the questions of the data set with their answers."""

    def judged(self, on_bad_input: OnBadInput) -> Iterator[tuple[Iterable[Document], list[PairExample]]]:
        for example in self.questions(on_bad_input):
            if not example.answers:
                on_bad_input.leave_out(*example.place, NO_ANSWER)
            pairs = [PairExample(*example.query, a.id, a.contents) for a in example.answers]
            yield (*example.candidates, *example.answers), pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaturalQuestionsPairs(_NaturalQuestions):
    """(question, long answer) pairs of a simplified file, train or dev, optionally gzipped."""

    path: str

    def questions(self, on_bad_input: OnBadInput) -> Iterator[Example]:
        seen: dict[str, int] = {}

        def parse(line: str, number: int) -> Example:
            return _example(json_object(line), (self.path, number), seen)

        return parsed_lines(self.path, parse, on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsNaturalQuestionsPairs(_NaturalQuestions):
    """(question, long answer) pairs of TFDS's "natural_questions/default", which has no candidates.

    Attributes:
      split: "train" or "validation".
      data_dir: TFDS's data directory; None: TFDS's default.
    """

    split: str = "train"
    data_dir: str | None = None

    def questions(self, on_bad_input: OnBadInput) -> Iterator[Example]:
        def parse(record: dict[str, Any], number: int) -> Example:
            tokens = record["document"]["tokens"]
            page = _Page(record["document"]["title"], tokens["token"], tokens["is_html"])
            answers = record["annotations"]["long_answer"]
            spans = list(zip(answers["start_token"], answers["end_token"], strict=True))
            question = needed_text(record["question"], "text")
            place = f"natural_questions:{self.split}", number
            return Example(place, Query(record["id"], question), page.passages(spans), ())

        return read_tfds("natural_questions/default", self.split, self.data_dir, parse, on_bad_input)


class _Page:
    """The tokens of a Wikipedia page, and whether each is an HTML tag."""

    def __init__(self, title: str, tokens: list[str], is_html: list[bool]):
        self.tokens, self.is_html = tokens, is_html
        self.title = title or self._heading()

    def passages(self, spans: list[tuple[int, int]]) -> tuple[Document, ...]:
        """Returns the distinct, non-empty texts of token spans; a span that starts at -1 means no answer."""
        found = {}
        for start, end in spans:
            if start < 0:
                continue
            if not start < end <= len(self.tokens):
                raise MalformedRecord(
                    "a span of tokens lies outside the document:", f"{start} to {end} of {len(self.tokens)}"
                )
            if text := self._text(start, end):
                found[text] = Document(text_id(f"{self.title} {text}"), self.title, text)
        return tuple(found.values())

    def _text(self, start: int, end: int) -> str:
        return " ".join(
            t for t, tag in zip(self.tokens[start:end], self.is_html[start:end], strict=True) if not tag
        )

    def _heading(self) -> str:
        if "<H1>" not in self.tokens or "</H1>" not in self.tokens:
            return ""
        return self._text(self.tokens.index("<H1>"), self.tokens.index("</H1>"))


def _example(record: dict[str, Any], place: tuple[str, int], seen: dict[str, int]) -> Example:
    question = needed_text(record, "question_text")
    identifier = record.get("example_id")
    if type(identifier) is not int:
        raise MalformedRecord("field 'example_id' is not an integer:", f"{identifier!r:.40}")
    if "document_text" in record:
        tokens = needed_text(record, "document_text").split(" ")
        is_html = [token.startswith("<") and token.endswith(">") for token in tokens]
    else:
        items = [as_object(item, "document_tokens") for item in list_field(record, "document_tokens")]
        tokens = [string_field(item, "token") for item in items]
        is_html = [bool(item.get("html_token")) for item in items]
        if not tokens:
            raise MalformedRecord("it has neither 'document_text' nor 'document_tokens'")
    page = _Page(string_field(record, "document_title", ""), tokens, is_html)
    annotations = [as_object(item, "annotations") for item in list_field(record, "annotations")]
    answers = [
        _span(as_object(item.get("long_answer"), "annotations"), "long_answer") for item in annotations
    ]
    candidates = [
        as_object(c, "long_answer_candidates") for c in list_field(record, "long_answer_candidates")
    ]
    top = [_span(item, "long_answer_candidates") for item in candidates if item.get("top_level")]
    passages = page.passages(answers), page.passages(top)
    return Example(place, Query(new_id(str(identifier), seen, question), question), *passages)


def _span(item: dict[str, Any], field: str) -> tuple[int, int]:
    start, end = item.get("start_token"), item.get("end_token")
    if type(start) is not int or type(end) is not int:
        raise MalformedRecord(f"an item of {field!r} has no start_token and end_token:", f"{item!r:.60}")
    return start, end
