"""TREC run files: a line `qid Q0 docid rank score tag` for each document that was found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.lines import as_number, bad_sign, raw_lines
from jaxir.storage.files import atomic_file, local_path

Run = dict[str, dict[str, float]]
TAG = "jaxir"
GREATEST = float(np.finfo(np.float32).max)
_TOO_GREAT = "too large: trec_eval ranks by scores in float32, where it would be infinite"


def write_run(
    path: str | Path,
    run: Mapping[str, Iterable[tuple[str, float]] | Mapping[str, float]],
    tag: str = TAG,
) -> None:
    """Writes `run` to `path`, best first; the file appears only when complete.

    Documents of equal score are written in descending order of id, like trec_eval ranks them. Scores keep
    all digits of their type (numpy's float32 or Python's float), so that different scores never become a
    tie.

    Args:
      path: the run file.
      run: query id -> documents, as (document id, score) pairs or as {document id: score}.
      tag: the name of the system, the last column.

    Raises:
      UserError: an id or the tag is empty or has white space or a control character, a score is not finite in
        float32, or a document occurs twice for a query.
    """
    _check_field("tag", tag)
    with atomic_file(path) as file:
        for query_id, answers in run.items():
            _check_field("query id", query_id)
            pairs = list(answers.items() if isinstance(answers, Mapping) else answers)
            if len({doc_id for doc_id, _ in pairs}) != len(pairs):
                raise UserError(f"query {query_id!r} has the same document twice: remove one")
            pairs.sort(key=lambda pair: pair[0], reverse=True)
            pairs.sort(key=lambda pair: -pair[1])
            for rank, (doc_id, score) in enumerate(pairs, start=1):
                _check_field("document id", doc_id)
                if not math.isfinite(score):
                    raise UserError(
                        f"the score of document {doc_id!r} for query {query_id!r} is {score}: give finite"
                        " scores"
                    )
                if abs(score) > GREATEST:
                    what = f"the score {score!s} of document {doc_id!r} for query {query_id!r}"
                    raise UserError(f"{what} is {_TOO_GREAT}")
                file.write(f"{query_id} Q0 {doc_id} {rank} {score!s} {tag}\n")


def read_run(path: str | Path) -> Run:
    """Reads a TREC run file, plain or compressed by gzip.

    Returns:
      {query id: {document id: score}}, in the order of the file. Ranks are ignored, like in trec_eval.

    Raises:
      BadInputError: the file is empty or not UTF-8, or a line does not have six columns, has a score that is
        not a finite number in float32, or repeats a document of its query.
    """
    run: Run = {}
    for number, query_id, doc_id, score in _lines(path):
        _add(run.setdefault(query_id, {}), doc_id, score, path, number)
    return run


def read_run_by_query(path: str | Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields (query id, {document id: score}) of a TREC run file, with one query at a time in memory.

    Raises:
      BadInputError: like in `read_run`, or the lines of a query are not consecutive.
    """
    current, answers = None, {}
    seen: set[str] = set()
    for number, query_id, doc_id, score in _lines(path):
        if query_id != current:
            if current is not None:
                yield current, answers
            if query_id in seen:
                raise BadInputError(
                    path, number, f"the lines of query {query_id!r} are not consecutive: sort by query"
                )
            seen.add(query_id)
            current, answers = query_id, {}
        _add(answers, doc_id, score, path, number)
    if current is not None:
        yield current, answers


def _lines(path: str | Path) -> Iterator[tuple[int, str, str, float]]:
    """Yields (line number, query id, document id, score) of a run file."""
    path = local_path(path)
    if not path.exists():
        raise UserError(f"{path}: no such run file")
    empty = True
    for number, raw in raw_lines(path):
        try:
            fields = raw.decode("utf-8").split()
        except UnicodeDecodeError:
            raise BadInputError(path, number, "not UTF-8") from None
        if not fields:
            continue
        if len(fields) != 6:
            wanted = "a run line has 6 columns (qid Q0 docid rank score tag)"
            cut = "" if raw.endswith(b"\n") else ": the file ends in the middle of this line"
            raise BadInputError(path, number, f"{wanted}, but this line has {len(fields)}{cut}")
        query_id, _, doc_id, _, text, _ = fields
        score = as_number(text)
        if score is None:
            raise BadInputError(path, number, f"the score {text!r} must be a finite number")
        if abs(score) > GREATEST:
            raise BadInputError(path, number, f"the score {text!r} is {_TOO_GREAT}")
        empty = False
        yield number, query_id, doc_id, score
    if empty:
        raise BadInputError(path, None, "the file is empty, but a run has a line for each document found")


def _add(answers: dict[str, float], doc_id: str, score: float, path: str | Path, number: int) -> None:
    if doc_id in answers:
        raise BadInputError(path, number, f"document {doc_id!r} occurs twice for its query: remove one")
    answers[doc_id] = score


def rank(answers: Mapping[str, float]) -> list[str]:
    """Orders documents like trec_eval: by score in float32, then by document id, both descending."""
    with np.errstate(over="ignore"):  # a score too large for float32 becomes inf; `write_run` raises for it
        scored = [(np.float32(score), doc_id) for doc_id, score in answers.items()]
    return [doc_id for _, doc_id in sorted(scored, reverse=True)]


def _check_field(what: str, text: str) -> None:
    sign = bad_sign(text)
    if not text or sign:
        why = f"it has {sign}" if text else "it is empty"
        raise UserError(
            f"the {what} {text!r} cannot be written to a run file, with spaces between columns: {why}"
        )
