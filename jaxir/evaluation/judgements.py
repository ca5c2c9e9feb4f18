"""Relevance judgements by query: BEIR's three columns or TREC's four."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxir.data.lines import MalformedRecord, as_integer, numbered_lines, parsed_lines
from jaxir.data.sources import Qrel, read_qrels


def read_judgements(path: str | Path) -> dict[str, dict[str, int]]:
    """Reads a file of judgements, in BEIR's format (query-id, corpus-id, score, by tabs) or TREC's.

    Returns:
      Query id to document id to score, in the order of the file.

    Raises:
      BadInputError: a malformed line, or a judgement that contradicts an earlier one.
      UserError: no such file.
    """
    _, first = next(numbered_lines(path), (0, b""))  # what is blank has no record, as its reader says
    is_beir = len(first.split(b"\t")) == 3 or len(first.split()) != 4
    return by_query(read_qrels(path) if is_beir else _read_trec(path))


def by_query(qrels: Iterator[Qrel]) -> dict[str, dict[str, int]]:
    """Collects judgements as query id to document id to score."""
    collected: dict[str, dict[str, int]] = {}
    for qrel in qrels:
        collected.setdefault(qrel.query_id, {})[qrel.document_id] = qrel.score
    return collected


def _read_trec(path: str | Path) -> Iterator[Qrel]:
    scores: dict[tuple[str, str], int] = {}

    def parse(line: str, _: int) -> Qrel:
        columns = line.split()
        if len(columns) != 4:
            raise MalformedRecord(
                "expected 4 columns (query, iteration, document, score),", f"found {len(columns)}"
            )
        query, _, document, text = columns
        if (score := as_integer(text)) is None:
            raise MalformedRecord("the score is not an integer:", repr(text))
        if scores.setdefault((query, document), score) != score:
            raise MalformedRecord("contradicts an earlier judgement", f"of {document!r} for {query!r}")
        return Qrel(query, document, score)

    return parsed_lines(path, parse, "stop")
