"""TREC run files: `qid Q0 docid rank score tag`, one line per answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxir.errors import BadInputError, UserError
from jaxir.files import atomic_file, local_path

Run = dict[str, dict[str, float]]


def write_run(
    path: str | Path,
    run: Mapping[str, Iterable[tuple[str, float]] | Mapping[str, float]],
    tag: str = "jaxir",
) -> None:
    """Writes `run` to `path`, best first; the file appears only when whole.

    Answers of equal score are written in descending order of document id, as trec_eval ranks them. Scores
    keep all the digits of their type (numpy's float32 or Python's float), so that two different scores
    never become a tie.

    Args:
      path: the run file.
      run: for each query id its answers, as (document id, score) pairs or as {document id: score}.
      tag: the name of the system, the last column.

    Raises:
      UserError: an id or the tag is empty or holds white space, a score is not finite, or an id comes twice.
    """
    _check_field("tag", tag)
    with atomic_file(path) as file:
        for query_id, answers in run.items():
            _check_field("query id", query_id)
            pairs = list(answers.items() if isinstance(answers, Mapping) else answers)
            if len({doc_id for doc_id, _ in pairs}) != len(pairs):
                raise UserError(f"query {query_id!r} has the same document twice among its answers")
            pairs.sort(key=lambda pair: pair[0], reverse=True)
            pairs.sort(key=lambda pair: -pair[1])
            for rank, (doc_id, score) in enumerate(pairs, start=1):
                _check_field("document id", doc_id)
                if not math.isfinite(score):
                    raise UserError(f"the score of document {doc_id!r} for query {query_id!r} is {score}")
                file.write(f"{query_id} Q0 {doc_id} {rank} {score!s} {tag}\n")


def read_run(path: str | Path) -> Run:
    """Reads a TREC run file.

    Returns:
      For each query id, in the order of the file, {document id: score}. Ranks are ignored, as trec_eval does.

    Raises:
      BadInputError: the file is not UTF-8, or a line has not six columns, has a score that is not a finite
        number, or names a document a second time for its query.
    """
    run: Run = {}
    for number, query_id, doc_id, score in _lines(path):
        _add(run.setdefault(query_id, {}), doc_id, score, path, number)
    return run


def read_run_by_query(path: str | Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields (query id, {document id: score}) of a TREC run file, holding one query at a time.

    Raises:
      BadInputError: as `read_run`, and where the lines of a query do not stand together.
    """
    current, answers = None, {}
    seen: set[str] = set()
    for number, query_id, doc_id, score in _lines(path):
        if query_id != current:
            if current is not None:
                yield current, answers
            if query_id in seen:
                raise BadInputError(path, number, f"the lines of query {query_id!r} do not stand together")
            seen.add(query_id)
            current, answers = query_id, {}
        _add(answers, doc_id, score, path, number)
    if current is not None:
        yield current, answers


def _lines(path: str | Path) -> Iterator[tuple[int, str, str, float]]:
    """Yields (line number, query id, document id, score)."""
    path = local_path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such run file")
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                fields = raw.decode("utf-8").split()
            except UnicodeDecodeError:
                raise BadInputError(path, number, "not UTF-8") from None
            if not fields:
                continue
            if len(fields) != 6:
                raise BadInputError(
                    path,
                    number,
                    f"a run line has 6 columns (qid Q0 docid rank score tag), this one {len(fields)}",
                )
            query_id, _, doc_id, _, text, _ = fields
            try:
                score = float(text)
            except ValueError:
                score = math.nan
            if not math.isfinite(score):
                raise BadInputError(path, number, f"the score {text!r} is not a finite number")
            yield number, query_id, doc_id, score


def _add(answers: dict[str, float], doc_id: str, score: float, path: str | Path, number: int) -> None:
    if doc_id in answers:
        raise BadInputError(path, number, f"document {doc_id!r} comes twice for its query")
    answers[doc_id] = score


def rank(answers: Mapping[str, float]) -> list[str]:
    """Orders documents as trec_eval does: by score in float32, then by document id, both descending."""
    return [doc_id for _, doc_id in sorted(((np.float32(s), d) for d, s in answers.items()), reverse=True)]


def _check_field(what: str, text: str) -> None:
    if not text or text.split() != [text]:
        raise UserError(
            f"the {what} {text!r} cannot stand in a run file: TREC runs separate columns by white space, "
            "so ids must not be empty or hold any"
        )
