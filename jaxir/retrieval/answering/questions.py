"""Questions with the passages that a run found for them, as tokens.

A reader's input for a passage has the format of Fusion-in-Decoder's authors, truncated at the end, without
`title:` if the document has no title:

    question: QUESTION title: TITLE context: TEXT

Each question and passage is tokenised once, and joined when needed. With a tokenizer that splits at spaces,
like T5's, the result is the same as tokenising the joined text.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.batches.text_table import TableBuilder, TextTable
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import Document, read_queries, read_wanted
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.retrieval.ranking.runs import rank, read_run_by_query
from jaxir.storage import fingerprints

NONE = -1  # marks a missing passage


class Questions:
    """Questions in the order of their file, each with at most P passages; made by `read_questions`."""

    def __init__(
        self,
        ids: list[str],
        questions: TextTable,
        passages: TextTable,
        found: np.ndarray,
        *,
        length: int,
        end: int,
    ):
        """Texts of both tables end with the token `end`; `found` [N, P] has row numbers of `passages`."""
        self.ids, self.passages, self.length = ids, found.shape[1], length
        self._questions, self._passages, self._found, self._end = questions, passages, found, end

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def fingerprint(self) -> str:
        """A hash of every question and passage, in order."""
        arrays = {"found": self._found}
        for name, table in (("questions", self._questions), ("passages", self._passages)):
            arrays |= {f"{name}_{part}": array for part, array in table._asdict().items()}
        return fingerprints.of_values(*self.ids, self.length, self._end, fingerprints.of_arrays(arrays))

    def sources(self, examples: np.ndarray) -> np.ndarray:
        """Returns the token ids of questions [B] joined with their passages, int32 [B, P, length]."""
        sources = np.empty((len(examples), self.passages, self.length), np.int32)
        for source, example in zip(sources, examples, strict=True):  # one by one, to keep index arrays small
            source[:] = self._source(example)
        return sources

    def _source(self, example: int) -> np.ndarray:
        rows, columns = self._found[example][:, None], np.arange(self.length)
        start, size = _places(self._questions, example)
        passage_starts, passage_sizes = _places(self._passages, np.maximum(rows, 0))
        behind = columns - size
        ids = np.where(
            behind < 0,
            self._questions.tokens(start + columns),
            self._passages.tokens(passage_starts + behind),
        )
        total = np.minimum(size + passage_sizes, self.length - 1)
        ids = np.where(columns < total, ids, np.where(columns == total, self._end, 0))
        return np.where(rows == NONE, 0, ids)


def _places(table: TextTable, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns where texts start in the table's tokens, and their lengths without the end token."""
    return table.offsets[rows], table.offsets[rows + 1] - table.offsets[rows] - 1


def passage_text(document: Document) -> str:
    title = f"title: {document.title} " if document.title else ""
    return f"{title}context: {document.text}"


def read_questions(
    run: str | Path,
    queries: str | Path,
    corpus: str | Path,
    tokenizer: Tokenizer,
    *,
    passages: int,
    length: int,
    prompt: str = "",
    of: Collection[str] | None = None,
    on_bad_input: OnBadInput | None = None,
) -> Questions:
    """Reads the questions of a run with the best passages of each question; only keeps their tokens.

    Questions that are not in the run are left out; their number is printed to standard error. A question may
    have fewer than `passages` passages.

    Args:
      run: a TREC run file in which the lines of a query are consecutive.
      passages: P, the maximum number of passages per question.
      length: maximum number of tokens of a question with a passage.
      of: ids of the questions to read; None reads all.
      on_bad_input: what to do with malformed lines of queries and corpus; None: stop.
    """
    collector = on_bad_input or OnBadInput("stop")
    end = _end_of(tokenizer)
    best = {
        query_id: rank(found)[:passages]
        for query_id, found in read_run_by_query(run)
        if of is None or query_id in of
    }
    if not best:
        raise UserError(f"{run} has no passages for any question of the split: give a run of this split")
    deepest = max(map(len, best.values()))
    if deepest < passages:
        raise UserError(
            f"{run} has at most {deepest} passages per question, but the reader reads {passages}: read fewer"
            " passages, or give a deeper run"
        )
    builder = TableBuilder(tokenizer, length, prompt, what="questions")
    ids, others = [], 0
    for query in read_queries(queries, collector):
        if query.id in best:
            builder.row(query.id, f"question: {query.text}")
            ids.append(query.id)
        elif of is None or query.id in of:
            others += 1
    if lacking := best.keys() - set(ids):
        raise UserError(f"{queries} lacks {min(lacking)!r}, a query of {run}: give the queries of the run")
    if others and jax.process_index() == 0:
        print(
            f"{others:,} of {others + len(ids):,} questions of {queries} have no passages in {run} and are"
            " left out",
            file=sys.stderr,
        )
    questions = builder.table()
    if (_places(questions, np.arange(len(ids)))[1] >= length - 1).all():
        raise UserError(
            f"questions leave no room for passages in {length} tokens: give a greater passage length"
        )
    texts, row_of = _tokenised(corpus, best, tokenizer, length, collector, run)
    found = np.full((len(ids), passages), NONE, np.int32)
    for row, query_id in zip(found, ids, strict=True):
        some = best[query_id]
        row[: len(some)] = [row_of[doc_id] for doc_id in some]
    return Questions(ids, questions, texts, found, length=length, end=end)


def _tokenised(
    corpus: str | Path,
    best: Mapping[str, list[str]],
    tokenizer: Tokenizer,
    length: int,
    collector: OnBadInput,
    run: str | Path,
) -> tuple[TextTable, dict[str, int]]:
    wanted = set().union(*best.values())
    builder, row_of = TableBuilder(tokenizer, length, "", what="passages"), {}
    for document in read_wanted(corpus, wanted, collector, named_by=f"the run {run} has found"):
        row_of[document.id] = builder.row(document.id, passage_text(document))
    return builder.table(), row_of


def _end_of(tokenizer: Tokenizer) -> int:
    special = tokenizer.encode_batch([""], max_length=8)[0]
    if len(special) != 1:
        raise UserError(
            f"the tokenizer adds {len(special)} special tokens to a text; give a model whose tokenizer only"
            " adds an end token, like T5's"
        )
    return int(special[0])
