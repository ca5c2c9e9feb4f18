"""Tokenises each (query, passage) pair as one sequence, for cross-encoders."""

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
_WHOLE = 2**30  # a maximum length that no text reaches


class TokenPair(NamedTuple):
    """The tokens of a pair, as a cross-encoder reads them.

    Attributes:
      ids: int32 [n], the ids that `Tokenizer` uses, special tokens included.
      types: int32 [n], 0 for the first text's tokens and 1 for the second's, if the tokenizer sets them.
    """

    ids: np.ndarray
    types: np.ndarray


class PairTokenizer:
    """Tokenises pairs of texts as one sequence each, by the tokenizer's own template for pairs.

    A SentencePiece model without a tokenizer.json uses T5's template: each text with its EOS.
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
        """The token that replaces the first token of a pair's second text; None if that token is dropped.

        "own" if the second text keeps its first token.
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
            f"this tokenizer encodes a text as {one.tolist()}, but that text paired with itself as"
            f" {pair.tolist()}, which is not supported: each text must begin or end with a special token, and"
            " only the second text may lose or replace its first token; use a model with another tokenizer"
        )

    def encode(self, pairs: Sequence[tuple[str, str]], *, max_length: int) -> list[TokenPair]:
        """Returns the tokens of each pair, at most `max_length`; the longer text is truncated first."""
        special = 2 if self._backend is None else self._backend.num_special_tokens_to_add(True)
        if max_length <= special + 1:
            raise UserError(
                f"max_length is {max_length}, but this tokenizer adds {special} special tokens to each pair:"
                " give a larger max_length"
            )
        found: list[TokenPair] = []
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            encode = self._put_together if self._backend is None else self._encode
            found += encode(list(pairs[start : start + _PAIRS_AT_ONCE]), max_length)
        return found

    def _put_together(self, pairs: list[tuple[str, str]], max_length: int) -> list[TokenPair]:
        # Encode texts without truncation, because their full lengths decide which one keeps one token more.
        rows = self._single.encode_batch([text for pair in pairs for text in pair], max_length=_WHOLE)
        found, room = [], max_length - 2
        for texts in zip(rows[::2], rows[1::2], strict=True):
            lengths = [len(text) - 1 for text in texts]
            shorter = min(*lengths, room // 2)
            # If both texts are equally long, the second keeps one token more, as in the tokenizers library.
            kept = [
                room - shorter if longer else shorter
                for longer in (lengths[0] > lengths[1], lengths[0] <= lengths[1])
            ]
            parts = [np.append(text[:-1][:k], text[-1:]) for text, k in zip(texts, kept, strict=True)]
            types = np.repeat(np.arange(2, dtype=np.int32), [len(part) for part in parts])
            found.append(TokenPair(np.concatenate(parts), types))
        return found

    def _encode(self, pairs: list[tuple[str, str]], max_length: int) -> list[TokenPair]:
        with self._lock:  # `enable_truncation` changes the tokenizer, which threads share
            self._backend.enable_truncation(max_length, strategy="longest_first")
            try:
                encoded = self._backend.encode_batch_fast(pairs)
            except (TypeError, UnicodeEncodeError) as error:
                raise UserError(f"a text of a pair is not valid Unicode ({error}): correct it") from error
        return [TokenPair(self._single.own_ids(e.ids), np.asarray(e.type_ids, np.int32)) for e in encoded]
