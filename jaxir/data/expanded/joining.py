"""Joins a document and queries into one token sequence, for the passage tower of a dual-cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer

_ENOUGH = 16  # maximum length, in tokens, of the sample texts that show which special tokens a tokenizer adds


class Joiner:
    """Appends queries to documents: [CLS] document [SEP] query [SEP], or for T5 document </s> query </s>.

    A document is truncated to leave room for one query; further queries are appended only if they fit.
    `document_length` is the maximum number of tokens per document with queries, `query_length` per query.
    """

    def __init__(self, tokenizer: Tokenizer, document_length: int, query_length: int):
        self._tokenizer, self._length, self._query_length = tokenizer, document_length, query_length
        special, some = tokenizer.encode_batch(["", "a"], max_length=_ENOUGH)
        front = 0
        while front < len(special) and special[front] == some[front]:
            front += 1
        self._front, self._back = front, len(special) - front
        if document_length - (query_length - front) <= len(special):
            raise UserError(
                f"documents of {document_length} tokens leave no room for a query of {query_length}: give a"
                " larger passage length (jaxir.encode: --max_length), or a smaller query length"
            )

    def queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids to append for each query, int32 [n], without the special tokens at its start."""
        rows = self._tokenizer.encode_batch(texts, max_length=self._query_length)
        return [row[self._front :] for row in rows]

    def join(self, document: np.ndarray, queries: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the ids of a document (int32 [m]), followed by the ids of `queries`: int32 [n].

        Both m and n are at most `document_length`. Without queries the document is returned unchanged.
        """
        if not queries:
            return document
        first, *more = queries
        room = self._length - len(first)
        if len(document) > room:
            end = len(document) - self._back
            document = np.concatenate([document[: room - self._back], document[end:]])
        parts, size = [document, first], len(document) + len(first)
        for query in more:
            if size + len(query) <= self._length:
                parts.append(query)
                size += len(query)
        return np.concatenate(parts)
