"""Tables of distinct texts, whose token ids are in one flat array."""

from __future__ import annotations

import array
import sys
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN, TokenCounts
from jaxir.data.formats.sources import folded, key_digest
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.data.text.truncation import Truncation

_TOKENISE_AT_ONCE = 4096
_COUNT_AT_ONCE = 65_536
# If the share of texts with the same tokens as another text exceeds these, jaxir warns or fails. Some percent
# are normal, from boilerplate and truncated texts. Fewer than 20 texts are not checked.
_EQUAL_WARNED, _EQUAL_REFUSED, _EQUAL_FROM = 0.1, 0.5, 20


class TextTable(NamedTuple):
    """The token ids of M distinct texts, concatenated.

    Attributes:
      flat: [T], uint16 if the vocabulary allows it, else int32. A padding token inside a text is 0 here.
      offsets: int64 [M + 1]; text m is flat[offsets[m]:offsets[m + 1]].
      keys: int32 [M, 2], the hash of each text's id.
    """

    flat: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray

    def ids(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Returns the zero-padded ids of texts `rows` [...]: int32 [..., `length`]."""
        starts = self.offsets[rows]
        sizes = self.offsets[rows + 1] - starts
        columns = np.arange(length)
        real = columns < sizes[..., None]
        positions = np.where(real, starts[..., None] + columns, 0)
        return np.where(real, self.tokens(positions), 0)

    def tokens(self, places: Any) -> np.ndarray:
        """Returns the ids at positions `places` [...] of `flat`, clipped to its ends: int32."""
        return with_padding_tokens(self.flat.take(places, mode="clip"))

    def row(self, number: int) -> np.ndarray:
        """Returns the ids of one text: int32 [n]."""
        return self.tokens(np.arange(self.offsets[number], self.offsets[number + 1]))

    def token_counts(self, vocab_size: int) -> TokenCounts:
        """Counts the tokens of all texts, except the first and last token of each text, which are special."""
        texts_with, occurrences = np.zeros((2, vocab_size), np.int64)
        texts = len(self.offsets) - 1
        for first in range(0, texts, _COUNT_AT_ONCE):
            starts = self.offsets[first : first + _COUNT_AT_ONCE + 1]
            flat = np.asarray(self.flat[starts[0] : starts[-1]], np.int64)
            ends = starts - starts[0]
            inside = np.ones(len(flat), bool)
            inside[ends[:-1]] = inside[ends[1:] - 1] = False
            text = np.repeat(np.arange(len(starts) - 1), np.diff(starts))[inside]
            occurrences += np.bincount(flat[inside], minlength=vocab_size)
            distinct = np.unique(text * vocab_size + flat[inside]) % vocab_size
            texts_with += np.bincount(distinct, minlength=vocab_size)
        return TokenCounts(texts, texts_with, occurrences)


def with_padding_tokens(stored: np.ndarray) -> np.ndarray:
    """Returns stored ids as int32, with 0 replaced by `PADDING_TOKEN`."""
    return np.where(stored == 0, np.int32(PADDING_TOKEN), stored.astype(np.int32))


class TableBuilder:
    """Collects distinct texts by id and tokenises them in blocks.

    Also counts, within a block, texts that have equal tokens but differ in more than case and white space. A
    model cannot distinguish such texts. Error messages call the texts `what`: "queries", "passages".
    `truncation` counts the texts that were tokenised or truncated.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, prompt: str, *, what: str):
        self._tokenizer, self._length, self._prompt, self._what = tokenizer, length, prompt, what
        self.truncation = Truncation(length)
        self._distinct = self._like_another = 0
        self._first_equal: tuple[str, str] | None = None
        self._dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        self._row_of: dict[bytes, int] = {}
        # For each row, a hash of the text and the number of the first example with the text.
        self._hashes, self._examples = array.array("q"), array.array("q")
        self._pending: list[str] = []
        self._flat: list[np.ndarray] = []
        self._sizes: list[int] = []

    def row(self, identifier: str, text: str, example: int = 0) -> int:
        """Returns the row of the text with this id; raises UserError if the id already has another text."""
        row = self._row_of.setdefault(key_digest(identifier), len(self._row_of))
        if row == len(self._hashes):
            self._hashes.append(hash(text))
            self._examples.append(example)
            self._pending.append(self._prompt + text)
            if len(self._pending) == _TOKENISE_AT_ONCE:
                self._flush()
        elif self._hashes[row] != hash(text):
            raise UserError(
                f"example {example}: among the {self._what} the id {identifier!r} has the text {text!r:.60},"
                f" but another text in example {self._examples[row]}: an id must have one text. Give each"
                " text its own id; jaxir.data.formats.sources.text_id(text) makes one"
            )
        return row

    def table(self) -> TextTable:
        """Returns the table of all texts, in the order of their first use; checks for equal tokens."""
        found = self.take()
        self.warn_of_equal_tokens()
        return found

    def take(self) -> TextTable:
        """Returns the table of the texts collected so far, and starts a new table at row 0."""
        self._flush()
        flat = np.concatenate([np.empty(0, self._dtype), *self._flat])
        offsets = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)]).astype(np.int64)
        keys = np.frombuffer(b"".join(self._row_of), "<i4").astype(np.int32).reshape(-1, 2)
        self._row_of, self._flat, self._sizes = {}, [], []
        self._hashes, self._examples = array.array("q"), array.array("q")
        return TextTable(flat, offsets, keys)

    def _flush(self) -> None:
        if self._pending:
            rows = self._tokenizer.encode_batch(
                self._pending, max_length=self._length, truncation=self.truncation
            )
            self._flat.append(np.maximum(np.concatenate(rows), 0).astype(self._dtype))
            self._sizes.extend(map(len, rows))
            self._count_equal(rows)
            self._pending.clear()

    def _count_equal(self, rows: list[np.ndarray]) -> None:
        first: dict[bytes, int] = {}
        others: dict[bytes, set[str]] = {}
        for i, row in enumerate(rows):
            tokens = row.tobytes()
            if (at := first.setdefault(tokens, i)) != i:
                one, other = (self._pending[row][len(self._prompt) :] for row in (at, i))
                known = others.setdefault(tokens, {folded(one)})
                if folded(other) not in known:
                    known.add(folded(other))
                    self._first_equal = self._first_equal or (one, other)
        like_another = sum(len(known) - 1 for known in others.values())
        self._distinct += len(first) + like_another
        self._like_another += like_another

    def warn_of_equal_tokens(self) -> None:
        """Warns if many texts have the same tokens as another text; raises UserError for more than half."""
        if self._distinct < _EQUAL_FROM or self._like_another <= _EQUAL_WARNED * self._distinct:
            return
        one, other = self._first_equal
        sentence = (
            f"{self._like_another:,} of {self._distinct:,} different {self._what} have the same tokens as"
            f" another one, so that no model can distinguish them (the first: {one!r:.60} and {other!r:.60});"
            f" use a tokenizer that knows their words, a shorter prompt or more than {self._length} tokens"
        )
        if self._like_another > _EQUAL_REFUSED * self._distinct:
            raise UserError(sentence)
        print(f"warning: {sentence}", file=sys.stderr)
