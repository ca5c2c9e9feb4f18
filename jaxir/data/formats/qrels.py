"""Reads relevance judgements from qrels/SPLIT.tsv files."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.data.formats.lines import (
    MalformedRecord,
    OddRecord,
    OnBadInput,
    Policy,
    as_grade,
    as_integer,
    parsed_lines,
)


class Qrel(NamedTuple):
    """A relevance judgement; a score of 1 or more is relevant."""

    query_id: str
    document_id: str
    score: int


def read_qrels(
    path: str | Path,
    on_bad_input: OnBadInput | Policy = "stop",
    *,
    query_ids: Container[str] | None = None,
    document_ids: Container[str] | None = None,
    trec: bool = False,
) -> Iterator[Qrel]:
    """Yields the judgements of a qrels/SPLIT.tsv (query-id, corpus-id, score), which may have a header line.

    Repeated judgements are left out; contradicting judgements are malformed. Judgements of unknown queries
    or documents (if ids are given), and grades written as decimals, are `OddRecord`s. With `trec`, the
    tab-separated columns are query, 0, document and score.
    """
    return parsed_lines(path, qrel_parser(query_ids, document_ids, trec=trec), on_bad_input)


def qrel_parser(
    query_ids: Container[str] | None, document_ids: Container[str] | None, *, trec: bool = False
) -> Callable[[str, int], Qrel | None]:
    """Returns a function that maps a line and its number to a `Qrel`; arguments as in `read_qrels`."""
    names = ("query-id", "0", "document-id", "score") if trec else ("query-id", "corpus-id", "score")
    scores: dict[tuple[str, str], int] = {}

    def parse(line: str, number: int) -> Qrel | None:
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != len(names):
            expected = f"expected {len(names)} tab-separated columns ({', '.join(names)})"
            raise MalformedRecord(expected, f"but found {len(columns)}")
        query, document, score_text, before = columns[0], columns[-2], columns[-1], len(scores)
        if number == 1 and (query, score_text) == ("query-id", "score"):
            return None
        qrel = Qrel(query, document, parse_grade(score_text))
        known = scores.setdefault((query, document), qrel.score)
        if known != qrel.score:
            raise MalformedRecord("contradicts an earlier judgement", f"of {document!r} for {query!r}")
        if len(scores) == before:
            return None
        if query_ids is not None and query not in query_ids:
            noted = "judgements of queries that the collection lacks, which are scored 0"
            raise OddRecord("judgement for an unknown query", repr(query), noted=noted, record=qrel)
        if document_ids is not None and document not in document_ids:
            noted = "judgements of documents that the collection lacks, which are scored as not retrieved"
            raise OddRecord("judgement for an unknown document", repr(document), noted=noted, record=qrel)
        return check_grade(qrel, score_text)

    return parse


def parse_grade(text: str) -> int:
    if (score := as_grade(text)) is None:
        raise MalformedRecord("the score is not an integer:", repr(text))
    return score


def check_grade(qrel: Qrel, text: str) -> Qrel:
    """Returns the judgement; raises OddRecord, with the judgement, if its grade was written as a decimal."""
    if as_integer(text) is None:
        noted = "grades written as decimals, which are read as integers"
        raise OddRecord("the score is not an integer:", repr(text), noted=noted, record=qrel)
    return qrel
