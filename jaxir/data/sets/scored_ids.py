"""Training data by ids: hard negatives and a teacher's scores, whose texts are in a collection."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxir.core.errors import UserError
from jaxir.core.values import Count, checked
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import MalformedRecord, OnBadInput, Policy, has_text
from jaxir.data.formats.sources import PairExample, read_wanted
from jaxir.data.formats.tables import Table
from jaxir.data.sets.pair_sources import PairSource

Scored = list[tuple[str, float | None]]  # ids of passages and their scores
_QUERY = ("query_id", "query-id", "qid")
_POSITIVE = ("positive_id", "positive_ids", "positive", "pos", "passage_id")
_NEGATIVE = ("negative_id", "negative_ids", "negatives", "negative", "neg")
_LIST = ("document_ids", "doc_ids", "passage_ids")
_SCORES = ("scores", "score", "labels", "label")


class _Row(NamedTuple):
    query: str
    positives: Scored
    negatives: Scored


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ScoredIds(PairSource):
    """Pairs with negatives and scores, given by ids, such as those published for MS MARCO.

    The rows of a JSONL, CSV, TSV or Parquet file have one of these forms (all ids are texts or whole
    numbers):

        {"qid": 1, "pos": [7], "neg": {"bm25": [8, 9], "dense": [9, 4]}}          no scores
        {"qid": 1, "pos": {"7": 9.1}, "neg": {"8": 2.5, "9": -1.0}}               scores by id
        {"query_id": 1, "positive_id": 7, "negative_id": 8, "score": 6.6}         the difference of two scores
        {"query_id": 1, "positive_id": 7, "negative_ids": [8, 9], "scores": [9.1, 2.5, -1.0]}
        {"query_id": 1, "document_ids": [8, 7, 9], "scores": [2.5, 9.1, -1.0]}    the best is the positive

    `negative_id_1`, `negative_id_2`, ... may stand instead of `negative_ids`. Each positive is a pair with
    all negatives of its row. Only texts that rows name are held in memory.

    Attributes:
      path: the file of rows.
      collection: where the texts are: a BEIR folder, hf:NAME or ir_datasets:ID.
      max_negatives: how many negatives of a row are kept, from the first one on; None: all.
    """

    path: str
    collection: str
    max_negatives: Count | None = None

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        table = Table(self.path)
        documents: set[str] = set()
        queries: set[str] = set()
        policy = on_bad_input.policy if isinstance(on_bad_input, OnBadInput) else on_bad_input
        for row in table.parsed(self._row, OnBadInput(policy)):
            queries.add(row.query)
            documents.update(name for name, _ in (*row.positives, *row.negatives))
        folder = BeirFolder(self.collection)
        of_queries = {query.id: query.text for query in folder.queries() if query.id in queries}
        if lacking := queries - of_queries.keys():
            raise UserError(
                f"{folder.queries_path} lacks {min(lacking)!r}, which {self.path} names ({len(lacking):,} of"
                f" {len(queries):,} queries): give the collection that these ids come from"
            )
        wanted = read_wanted(folder.corpus_path, documents, named_by=f"{self.path} names")
        contents = {document.id: document.contents for document in wanted}

        def parse(record: Mapping[str, Any], number: int) -> list[PairExample]:
            return list(_pairs(self._row(record, number), of_queries, contents))

        yield from itertools.chain.from_iterable(table.parsed(parse, on_bad_input))

    def _row(self, record: Mapping[str, Any], number: int) -> _Row:
        name = next((name for name in _QUERY if record.get(name) is not None), None)
        if name is None:
            raise MalformedRecord(f"no column {' or '.join(_QUERY)}", f"(it has {', '.join(record):.200})")
        row = _of_list(record) if any(n in record for n in _LIST) else _of_two(record)
        if not row[0]:
            raise MalformedRecord("the row has no positive passage")
        return _Row(_id(record[name]), row[0], row[1][: self.max_negatives])


def _pairs(row: _Row, queries: Mapping[str, str], contents: Mapping[str, str]) -> Iterator[PairExample]:
    for name, score in row.positives:
        if not has_text(contents[name]):
            raise MalformedRecord("the positive passage has neither title nor text:", repr(name))
        relevant = {other for other, _ in row.positives}
        negatives = [(n, s) for n, s in row.negatives if n not in relevant and has_text(contents[n])]
        texts = tuple((n, contents[n]) for n, _ in negatives)
        scores = None if score is None else tuple(s for _, s in negatives if s is not None)
        if scores is None or len(scores) < len(negatives):
            score = scores = None
        yield PairExample(row.query, queries[row.query], name, contents[name], texts, score, scores)


def _of_list(record: Mapping[str, Any]) -> tuple[Scored, Scored]:
    """Returns positives and negatives of a row that lists passages and scores; the best is the positive."""
    ids = _ids(next(record[name] for name in _LIST if name in record))
    scores = next((record[name] for name in _SCORES if name in record), None)
    if not isinstance(scores, list) or len(scores) != len(ids):
        raise MalformedRecord(
            f"expected {len(ids)} scores, a list beside the ids,", f"but found {scores!r:.40}"
        )
    scored = list(zip([name for name, _ in ids], map(_number, scores), strict=True))
    best = max(range(len(scored)), key=lambda at: scored[at][1], default=0)
    return scored[best : best + 1], scored[:best] + scored[best + 1 :]


def _of_two(record: Mapping[str, Any]) -> tuple[Scored, Scored]:
    """Returns positives and negatives of a row that has columns of both."""
    positives = _ids(next((record[name] for name in _POSITIVE if name in record), None))
    numbered = sorted(
        (name for name in record if name.startswith("negative_id_")), key=lambda name: (len(name), name)
    )
    one = next((record[name] for name in _NEGATIVE if name in record), None)
    negatives = _ids([record[name] for name in numbered if record[name] is not None] if numbered else one)
    scores = next((record[name] for name in _SCORES if record.get(name) is not None), None)
    if scores is None:
        return positives, negatives
    if not isinstance(scores, list):
        if len(positives) != 1 or len(negatives) != 1:
            raise MalformedRecord("one score needs one positive and one negative;", "give a list of scores")
        # The positive scores the difference, the negative 0: losses only read differences.
        scores = [scores, 0.0]
    count = len(positives) + len(negatives)
    if len(scores) != count:
        raise MalformedRecord(f"expected {count} scores, the positive's first,", f"but found {len(scores)}")
    numbers = list(map(_number, scores))
    scored = [(name, score) for (name, _), score in zip((*positives, *negatives), numbers, strict=True)]
    return scored[: len(positives)], scored[len(positives) :]


def _ids(value: Any) -> Scored:
    """Returns the ids and scores of a value: an id, a list of ids, {id: score}, or {system: list of ids}."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        if any(isinstance(ids, list) for ids in value.values()):
            ids = dict.fromkeys(itertools.chain.from_iterable(map(_ids, value.values())))
            return list(ids)
        return [(_id(name), _number(score)) for name, score in value.items() if score is not None]
    return [(_id(item), None) for item in (value if isinstance(value, list) else [value])]


def _id(value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise MalformedRecord("an id is neither a text nor a whole number:", f"{value!r:.40}")
    return str(value)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise MalformedRecord("a score is not a number:", f"{value!r:.40}") from None
