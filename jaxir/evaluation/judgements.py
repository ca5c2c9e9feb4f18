"""Reads relevance judgements (qrels) in BEIR's format with 3 columns or TREC's with 4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxir.data.formats.lines import MalformedRecord, OnBadInput, numbered_lines, parsed_lines
from jaxir.data.formats.qrels import Qrel, check_grade, parse_grade, read_qrels
from jaxir.data.formats.sources import read_excluded


def read_judgements(path: str | Path, *, strict: bool = False) -> dict[str, dict[str, int]]:
    """Reads a qrels file in BEIR's format (3 columns, tabs) or TREC's: {query id: {document id: score}}.

    Grades written as decimals (1.0) are accepted, and their number is reported; `strict` refuses them.
    """
    _, first = next(numbered_lines(path), (0, b""))  # the readers called below refuse an empty file
    is_beir = len(first.split(b"\t")) == 3 or len(first.split()) != 4
    collector = OnBadInput(strict=strict)
    found = by_query(read_qrels(path, collector) if is_beir else _read_trec(path, collector))
    collector.report()
    return found


def read_excluded_beside(qrels: str | Path) -> dict[str, tuple[str, ...]]:
    """Returns ids of documents that results must not have, by the id of the query.

    They are in the queries of the BEIR folder (DIR/queries.jsonl[.gz]) that has the judgements as
    DIR/qrels/SPLIT.tsv. {} if the judgements are not in such a folder.
    """
    folder = Path(qrels).parent
    files = [folder.parent / name for name in ("queries.jsonl", "queries.jsonl.gz")]
    if folder.name != "qrels":
        return {}
    return next((read_excluded(file) for file in files if file.is_file()), {})


def by_query(qrels: Iterator[Qrel]) -> dict[str, dict[str, int]]:
    """Collects judgements as {query id: {document id: score}}."""
    collected: dict[str, dict[str, int]] = {}
    for qrel in qrels:
        collected.setdefault(qrel.query_id, {})[qrel.document_id] = qrel.score
    return collected


def _read_trec(path: str | Path, collector: OnBadInput) -> Iterator[Qrel]:
    scores: dict[tuple[str, str], int] = {}

    def parse(line: str, _: int) -> Qrel:
        columns = line.split()
        if len(columns) != 4:
            raise MalformedRecord(
                "expected 4 columns (query, iteration, document, score),", f"found {len(columns)}"
            )
        query, _, document, text = columns
        qrel = Qrel(query, document, parse_grade(text))
        if scores.setdefault((query, document), qrel.score) != qrel.score:
            raise MalformedRecord("contradicts an earlier judgement", f"of {document!r} for {query!r}")
        return check_grade(qrel, text)

    return parsed_lines(path, parse, collector)
