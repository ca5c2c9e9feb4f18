"""Expanded queries in the order of a reranker's scores, and what is made of them (EAR and GAR)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.expanded.candidates import Candidates, check_corpus, expanded, passages_of, read_passages
from jaxir.retrieval.encoding.windowed_file import OutputsReport, write_windows
from jaxir.storage import fingerprints
from jaxir.storage.files import local_path

WINDOW = 256  # questions, of some 50 queries each, that are scored together
By = Literal["place", "concat", "oracle"]


class Scorer(Protocol):
    """What is asked of a reranker of queries, as `encoding.query_reranker.QueryReranker` is one."""

    fingerprint: str
    max_length: int

    @property
    def reads_passages(self) -> bool: ...

    def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray: ...


def write_reranked(
    reranker: Scorer,
    questions: Sequence[Candidates],
    output: str | Path,
    *,
    corpus: str | Path | None = None,
    keep: int | None = None,
    window: int = WINDOW,
) -> OutputsReport | None:
    """Writes the candidates of questions, best first, with `scores` and the best query as `text`.

    The file appears only when whole. Run again after an interruption it continues; several processes of one
    run share the work.

    Args:
      reranker: scores queries, the greater the better.
      corpus: the corpus of the passages, if the reranker reads them.
      keep: so many of a question, the best ones; None: all.
      window: questions that are scored together.

    Returns:
      What is in the file, in the first process; None in the others.

    Raises:
      UserError: a corpus is lacking or there is one too many, it lacks a passage, or as `write_windows`.
    """
    check_corpus(corpus, reads=reranker.reads_passages)
    texts: dict[str, str] = {}
    if corpus is not None:
        found = read_passages(corpus, set().union(*map(passages_of, questions)))
        texts = {passage: document.contents for passage, document in found.items()}

    def make(batch: Sequence[Candidates], done: Callable[[int], Any]) -> Iterator[dict[str, Any]]:
        pairs = [
            (query, texts.get(passage, ""))
            for some in batch
            for query, passage in zip(some.queries, some.passages or itertools.repeat(None), strict=False)
        ]
        scores = reranker.score(pairs)
        for some in batch:
            own, scores = scores[: len(some.outputs)], scores[len(some.outputs) :]
            order = np.argsort(-own, kind="stable")[:keep]
            best = some.of(order.tolist())
            yield {"text": best.queries[0], **best.fields(), "scores": own[order].tolist()}
            done(1)

    made = {
        "questions": fingerprints.of_values(*map(str, questions)),
        "passages": fingerprints.of_values(*sorted(texts.items())),
        "model": reranker.fingerprint,
        "max_length": reranker.max_length,
        "keep": keep,
        "window": window,
    }
    return write_windows(
        local_path(output, "written to"),
        made,
        questions,
        make,
        count=len(questions),
        what="reranking",
        window=window,
    )


def write_chosen(
    questions: Sequence[Candidates], output: str | Path, *, by: By, place: int = 1
) -> OutputsReport | None:
    """Writes a query of each question that has one, as queries.jsonl and, but for "concat", as candidates.

    Args:
      by: "place": the candidate at this place (1: what is first); "concat": the question with all of them;
        "oracle": the one of the least rank, the first of equals.
      place: of "place".

    Raises:
      UserError: ranks are asked for and are not known, or no question has so many candidates.
    """
    if by == "oracle" and any(some.ranks is None for some in questions):
        raise UserError("the best query is told by ranks: make the candidates with --answers")

    def chosen(some: Candidates) -> dict[str, Any]:
        if by == "concat":
            return {
                "text": expanded(some.question, " ".join(filter(None, some.outputs))),
                "outputs": some.outputs,
            }
        at = place - 1
        if by == "oracle":
            at = min(range(len(some.ranks)), key=lambda n: (some.ranks[n] is None, some.ranks[n] or 0))
        return {"text": some.queries[at], **some.of([at]).fields()}

    enough = [some for some in questions if by != "place" or len(some.outputs) >= place]
    if not enough:
        raise UserError(f"no question has {place} candidates")
    return write_windows(
        local_path(output, "written to"),
        {"questions": fingerprints.of_values(*map(str, enough)), "by": by, "place": place},
        enough,
        lambda batch, done: map(chosen, batch),
        count=len(enough),
        what="choosing",
        window=len(enough),
    )
