"""Readers of training pairs: JSONL, TSV and Tevatron-style JSONL, all optionally gzipped, and Parquet.

An id stands for one text: a file in which it stands for two is malformed, since duplicate masking goes by id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.values import fits
from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    as_object,
    has_text,
    json_object,
    list_field,
    needed_text,
    parsed_lines,
    string_field,
)
from jaxir.data.formats.pair_table import check_no_header, two_texts
from jaxir.data.formats.sources import PairExample, joined, text_id
from jaxir.data.formats.tables import Table

_FIELDS = ("query", "passage", "negatives", "query_id", "passage_id")


def read_pairs_jsonl(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[PairExample]:
    """Yields pairs from lines such as {"query": "...", "passage": "...", "negatives": ["...", ...]}.

    Optional: `query_id`, `passage_id` (default: a hash of the text) and `negatives`, a list of texts or of
    objects {"passage_id": "...", "passage": "..."}.
    """
    ids = _Ids()
    return parsed_lines(path, lambda line, number: _pair(json_object(line), ids, number), on_bad_input)


def read_pairs_parquet(path: str | Path, on_bad_input: OnBadInput) -> Iterator[PairExample]:
    """Yields pairs from the rows of a Parquet file, whose columns are the fields of `read_pairs_jsonl`.

    Some thousand rows are in memory at a time.

    Raises:
      UserError: it is called otherwise than .parquet, or pyarrow is not installed.
      BadInputError: it is no Parquet file, or a row is malformed and is not skipped.
    """
    table, ids = Table(path), _Ids()
    if table.kind != "parquet":
        raise UserError(f"{path}: a Parquet file must be called .parquet")
    if missing := [name for name in ("query", "passage") if name not in table.columns]:
        raise BadInputError(path, None, f"no column {missing[0]!r} (it has {', '.join(table.columns)})")
    columns = [name for name in _FIELDS if name in table.columns]
    for number, record in table.records(columns, on_bad_input):
        try:
            yield _pair(record, ids, number)
        except MalformedRecord as fault:
            on_bad_input.record(table.path, number, fault.kind, fault.detail)


def _pair(record: dict[str, Any], ids: _Ids, number: int) -> PairExample:
    query, passage = needed_text(record, "query"), needed_text(record, "passage")
    negatives = [
        {"passage": item} if isinstance(item, str) else as_object(item, "negatives")
        for item in list_field(record, "negatives")
    ]
    return PairExample(
        ids.of("query", string_field(record, "query_id", None), query, number),
        query,
        ids.of("passage", string_field(record, "passage_id", None), passage, number),
        passage,
        tuple(_passage(ids, n, number) for n in negatives),
    )


def read_pairs_tsv(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[PairExample]:
    """Yields pairs from lines of query<TAB>passage[<TAB>negative...]; ids are hashes of the texts."""

    def parse(line: str, number: int) -> PairExample:
        texts = [column.strip() for column in line.split("\t")]
        if len(texts) < 2:
            raise MalformedRecord("expected query<TAB>passage[<TAB>negative...]", "but the line has no tab")
        if not all(found := list(map(has_text, texts))):
            raise MalformedRecord("an empty column", f"(number {found.index(False) + 1})")
        if number == 1:
            check_no_header(*texts[:2])
        (query_id, query), (passage_id, passage), *negatives = ((text_id(text), text) for text in texts)
        return PairExample(query_id, query, passage_id, passage, tuple(negatives))

    return parsed_lines(path, parse, on_bad_input)


def read_tevatron(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[PairExample]:
    """Yields a pair for each positive passage of lines such as

        {"query_id": "...", "query": "...", "positive_passages": [{"docid", "title", "text"}, ...],
         "negative_passages": [{"docid", "title", "text"}, ...]}

    `title` and `negative_passages` may be absent. Each pair carries all negatives of its line but those that
    are positive passages there, too, and where all passages have a `score` (`jaxir.mine --teacher` writes it)
    these.
    """
    ids = _Ids()

    def parse(line: str, number: int) -> list[PairExample]:
        record = json_object(line)
        query = needed_text(record, "query")
        query_id = ids.of("query", string_field(record, "query_id"), query, number)
        positives, negatives = (
            [_tevatron_passage(ids, item, name, number) for item in list_field(record, name)]
            for name in ("positive_passages", "negative_passages")
        )
        if not positives:
            raise MalformedRecord("no positive passage in 'positive_passages'")
        every = [text for text, _ in positives]
        found = []
        for text, score in positives:
            of_pair = [(n, s) for n, s in negatives if is_negative(n, text, every)]
            texts, scores = tuple(n for n, _ in of_pair), tuple(s for _, s in of_pair)
            found.append(PairExample(query_id, query, *text, texts, score, scores))
        if any(score is None for _, score in (*positives, *negatives)):
            return [pair._replace(passage_score=None, negative_scores=None) for pair in found]
        return found

    for examples in parsed_lines(path, parse, on_bad_input):
        yield from examples


def is_negative(
    text: tuple[str, str], passage: tuple[str, str], positives: Sequence[tuple[str, str]]
) -> bool:
    """Whether a text, (id, text), may be a pair's negative: it is no other positive passage of the query.

    That it may be the pair's own passage is the affair of who reads the pairs, as once both are cut.
    """
    return text[1] == passage[1] or all(text[1] != other for _, other in positives)


class _Ids:
    """Hands out ids, and finds those that stand for two texts."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}  # the text's hash, and the line of the first

    def of(self, kind: str, identifier: str | None, text: str, number: int) -> str:
        """Returns the id of a text on line `number`, which may have come without one."""
        if identifier is None:
            return text_id(text)
        if not identifier:
            raise MalformedRecord(f"empty {kind} id")
        known, first = self._seen.setdefault((kind, identifier), (hash(text), number))
        if known != hash(text):
            raise two_texts(kind, identifier, first)
        return identifier


def _passage(ids: _Ids, record: dict[str, Any], number: int) -> tuple[str, str]:
    text = needed_text(record, "passage")
    return ids.of("passage", string_field(record, "passage_id", None), text, number), text


def _tevatron_passage(ids: _Ids, item: Any, field: str, number: int) -> tuple[tuple[str, str], float | None]:
    record = as_object(item, field)
    score = record.get("score")
    if score is not None and not fits(score, float):
        raise MalformedRecord(f"a passage of {field!r} has a score that is no number:", repr(score))
    text = joined(string_field(record, "title", ""), string_field(record, "text"))
    if not has_text(text):
        raise MalformedRecord(f"a passage of {field!r} has neither title nor text")
    return (ids.of("passage", string_field(record, "docid"), text, number), text), score
