"""Distinct texts as token ids in flat arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxir.data.sources import key_digest
from jaxir.data.tokenizer import Tokenizer

_TOKENISE_AT_ONCE = 4096


class TextTable(NamedTuple):
    """Token ids of distinct texts, end to end.

    Attributes:
      flat: [T], uint16 where the vocabulary allows it, else int32.
      offsets: int64 [M + 1]; text m is flat[offsets[m]:offsets[m + 1]].
      keys: int32 [M, 2], the hash of each text's id.
    """

    flat: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray

    def ids(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Returns int32 [..., `length`], zero-padded, for texts `rows` [...]."""
        starts = self.offsets[rows]
        sizes = self.offsets[rows + 1] - starts
        columns = np.arange(length)
        real = columns < sizes[..., None]
        positions = np.where(real, starts[..., None] + columns, 0)
        return np.where(real, self.flat[positions], 0).astype(np.int32)


class TableBuilder:
    """Collects distinct texts by id and tokenises them some thousands at a time.

    Args:
      tokenizer: makes the ids.
      length: most tokens of a text.
      prompt: put before each text.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, prompt: str):
        self._tokenizer, self._length, self._prompt = tokenizer, length, prompt
        self._dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        self._row_of: dict[bytes, int] = {}
        self._pending: list[str] = []
        self._flat: list[np.ndarray] = []
        self._sizes: list[int] = []

    def row(self, identifier: str, text: str) -> int:
        """Returns the row of a text, which is known by its id."""
        row = self._row_of.setdefault(key_digest(identifier), len(self._row_of))
        if row == len(self._sizes) + len(self._pending):
            self._pending.append(self._prompt + text)
            if len(self._pending) == _TOKENISE_AT_ONCE:
                self._flush()
        return row

    def table(self) -> TextTable:
        """Returns the table of all texts, in the order in which they came."""
        self._flush()
        flat = np.concatenate([np.empty(0, self._dtype), *self._flat])
        offsets = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)]).astype(np.int64)
        keys = np.frombuffer(b"".join(self._row_of), "<i4").astype(np.int32).reshape(-1, 2)
        return TextTable(flat, offsets, keys)

    def _flush(self) -> None:
        if self._pending:
            rows = self._tokenizer.encode_batch(self._pending, max_length=self._length)
            self._flat.append(np.concatenate(rows).astype(self._dtype))
            self._sizes.extend(map(len, rows))
            self._pending.clear()
