"""Reranks expanded queries, and chooses one for each question (EAR and GAR)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.expanded.candidates import Candidates, check_corpus, expanded, passages_of, read_passages
from jaxir.retrieval.encoding.windowed_file import OutputsReport, write_windows
from jaxir.storage import fingerprints
from jaxir.storage.files import local_path

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.query_reranker import QueryReranker

WINDOW = 256  # number of questions, of about 50 queries each, scored together
By = Literal["place", "concat", "oracle"]


def write_reranked(
    reranker: QueryReranker,
    questions: Sequence[Candidates],
    output: str | Path,
    *,
    corpus: str | Path | None = None,
    keep: int | None = None,
    window: int = WINDOW,
) -> OutputsReport | None:
    """Writes each question's `keep` best candidates, best first, with `scores`; the best is also `text`."""
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
    """Writes a query for each question, as queries.jsonl and, except for "concat", as candidates.

    Args:
      by: "place": the candidate number `place`, from 1; questions with fewer candidates are left out.
        "concat": the question with all candidates. "oracle": the first candidate with the best rank.
    """
    if by == "oracle" and any(some.ranks is None for some in questions):
        raise UserError(
            "choosing the best query needs ranks: recreate the candidates with"
            " `expand retrieve --answers=FILE`"
        )

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
        raise UserError(f"no question has {place} candidates: give a smaller --place")
    return write_windows(
        local_path(output, "written to"),
        {"questions": fingerprints.of_values(*map(str, enough)), "by": by, "place": place},
        enough,
        lambda batch, done: map(chosen, batch),
        count=len(enough),
        what="choosing",
        window=len(enough),
    )
