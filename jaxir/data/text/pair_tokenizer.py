"""(query, passage) -> the token ids of one sequence, as a cross-encoder reads them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import tokenizers

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.storage.temporary_outputs import temporary_directory

_PAIRS_AT_ONCE = 1024
_WHOLE = 2**30


class TokenPair(NamedTuple):
    """A pair as a cross-encoder reads it.

    Attributes:
      ids: int32 [n], special tokens included, numbered as `Tokenizer` does.
      types: int32 [n], 0 for the first text's tokens and 1 for the second's, where the tokenizer tells them
        apart.
    """

    ids: np.ndarray
    types: np.ndarray


class PairTokenizer:
    """Turns pairs of texts into one sequence each, by the tokenizer's own template for pairs.

    A lone SentencePiece model has T5's: each text with its EOS.

    Args:
      tokenizer: one for single texts.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._backend, self._single = None, tokenizer
        with temporary_directory() as directory:
            tokenizer.save(directory)
            path = directory / "tokenizer.json"
            if path.is_file():
                self._backend = tokenizers.Tokenizer.from_file(str(path))
                self._backend.no_padding()
        self._lock = threading.Lock()

    @property
    def separator(self) -> int | Literal["own"] | None:
        """What begins the second text of a pair in place of that text's own first token; None: nothing.

        "own" where the second text stays as it is by itself.

        Raises:
          UserError: pairs are made otherwise of their texts.
        """
        if self._backend is None:
            return "own"
        given = (("a",), ("b",), ("a", "a"))
        one, other, pair = (self._single.own_ids(self._backend.encode(*texts).ids) for texts in given)
        second, rest = pair[len(one) :], one[1:]
        if np.array_equal(pair, [*one, *one]) and one[-1] == other[-1]:
            return "own"
        if one[0] == other[0] and np.array_equal(pair[: len(one)], one):
            if np.array_equal(second, rest):
                return None
            if np.array_equal(second[1:], rest):
                return int(second[0])
        raise UserError(
            f"a tokenizer that joins {one.tolist()} with itself to {pair.tolist()} is not one for pairs: each"
            " text begins with a special token, of which the second may have another or none, or ends in one"
        )

    def encode(self, pairs: Sequence[tuple[str, str]], *, max_length: int) -> list[TokenPair]:
        """Returns the tokens of each pair, at most `max_length`.

        Of a pair that is too long the longer text is cut first, and both once they are equally long
        (`longest_first`).

        Raises:
          UserError: `max_length` leaves no room for text, or a text is not a valid Unicode string.
        """
        special = 2 if self._backend is None else self._backend.num_special_tokens_to_add(True)
        if max_length <= special + 1:
            raise UserError(
                f"max_length is {max_length}, but this tokenizer adds {special} special tokens to each pair:"
                " give a larger one"
            )
        found: list[TokenPair] = []
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            encode = self._put_together if self._backend is None else self._encode
            found += encode(list(pairs[start : start + _PAIRS_AT_ONCE]), max_length)
        return found

    def _put_together(self, pairs: list[tuple[str, str]], max_length: int) -> list[TokenPair]:
        """Returns the tokens of pairs by those of each text, with its EOS."""
        # Not cut: which of two long texts is the longer decides who has the odd token.
        rows = self._single.encode_batch([text for pair in pairs for text in pair], max_length=_WHOLE)
        found, room = [], max_length - 2
        for texts in zip(rows[::2], rows[1::2], strict=True):
            lengths = [len(text) - 1 for text in texts]
            shorter = min(*lengths, room // 2)
            # Of two equally long ones the second has the odd token, as elsewhere.
            kept = [
                room - shorter if longer else shorter
                for longer in (lengths[0] > lengths[1], lengths[0] <= lengths[1])
            ]
            parts = [np.append(text[:-1][:k], text[-1:]) for text, k in zip(texts, kept, strict=True)]
            types = np.repeat(np.arange(2, dtype=np.int32), [len(part) for part in parts])
            found.append(TokenPair(np.concatenate(parts), types))
        return found

    def _encode(self, pairs: list[tuple[str, str]], max_length: int) -> list[TokenPair]:
        with self._lock:  # the length is a state of the tokenizer
            self._backend.enable_truncation(max_length, strategy="longest_first")
            try:
                encoded = self._backend.encode_batch_fast(pairs)
            except (TypeError, UnicodeEncodeError) as error:
                raise UserError(f"a text of a pair is not a valid Unicode string ({error})") from error
        return [TokenPair(self._single.own_ids(e.ids), np.asarray(e.type_ids, np.int32)) for e in encoded]
