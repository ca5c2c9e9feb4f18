"""Tokenizers as TensorFlow operations for served models: texts in, the ids of `Tokenizer` out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tokenizers

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.core.installation import how_to_install
from jaxir.data.text.pair_tokenizer import PairTokenizer
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.exports.graph_wordpiece import WordPiece
from jaxir.storage.temporary_outputs import temporary_directory

if TYPE_CHECKING:
    import tensorflow as tf


_PROBE = 32  # characters or pieces in each text with which the graph and the tokenizer are compared


class GraphTokenizer:
    """A tokenizer as TensorFlow operations, for single texts or, if `num_texts` is 2, for pairs of texts.

    Text that is not valid UTF-8 raises an InvalidArgumentError. The constructor compares the graph with
    `Tokenizer` (`PairTokenizer`) on every piece of the vocabulary, every character of Unicode's first two
    planes and many others, and on truncated pairs. A SavedModel must hold its `state`.
    """

    def __init__(self, tokenizer: Tokenizer, num_texts: int = 1):
        require_tensorflow_text()
        self._pad_swap = tokenizer.pad_swap
        with temporary_directory() as directory:
            tokenizer.save(directory)
            if tokenizer.model_file is None:
                text = (directory / "tokenizer.json").read_text(encoding="utf-8")
                self._pieces: Any = WordPiece(json.loads(text))
                self._template = _template(text, num_texts)
            else:
                self._pieces = _SentencePiece((directory / tokenizer.model_file).read_bytes())
                end = tokenizer.encode_batch([""], max_length=2)[0].tolist()
                template = ([_Part(n), *(_Part(n, i) for i in end)] for n in range(num_texts))
                self._template = list(itertools.chain.from_iterable(template))
        self._num_special = sum(part.special is not None for part in self._template)
        self.state = self._pieces.state
        self._compare(tokenizer, num_texts)

    def __call__(
        self, texts: Sequence[tf.Tensor], max_length: int
    ) -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
        """Returns ids and token types, int32 [B, None], with special tokens, without padding.

        `texts` has one tensor of UTF-8 texts [B], or two: the first and the second texts of pairs.
        """
        import tensorflow as tf

        valid = [tf.strings.unicode_transcode(t, "UTF-8", "UTF-8", errors="strict") for t in texts]
        pieces = iter(_cut([self._pieces(text) for text in valid], max_length - self._num_special))
        column = tf.RaggedTensor.from_tensor(tf.zeros([tf.shape(texts[0])[0], 1], tf.int32))
        parts = [next(pieces) if p.special is None else column + p.special for p in self._template]
        types = [tf.zeros_like(ids) + p.type for ids, p in zip(parts, self._template, strict=True)]
        ids, types = tf.concat(parts, axis=1), tf.concat(types, axis=1)
        return ids.with_flat_values(renumbered(ids.flat_values, self._pad_swap)), types

    def _compare(self, tokenizer: Tokenizer, num_texts: int) -> None:
        planes = (range(0xD800), range(0xE000, 0x20000), range(0x20000, 0x110000, 61))
        characters = [chr(c) for plane in planes for c in plane]
        pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
        length = 8 * _PROBE
        for parts in (characters, pieces):
            texts = [" ".join(parts[start : start + _PROBE]) for start in range(0, len(parts), _PROBE)]
            if num_texts == 1:
                self._check([texts], [tokenizer.encode_batch(texts, max_length=length)], length)
            else:
                self._check_pairs(tokenizer, texts, texts[::-1], 2 * length)
        if num_texts == 2:
            first, second = zip(*itertools.product(range(8), repeat=2), strict=True)
            for length in range(8, 11):
                self._check_pairs(tokenizer, ["a " * n for n in first], ["b " * n for n in second], length)

    def _check_pairs(self, tokenizer: Tokenizer, first: list[str], second: list[str], length: int) -> None:
        pairs = PairTokenizer(tokenizer).encode(list(zip(first, second, strict=True)), max_length=length)
        self._check([first, second], list(zip(*pairs, strict=True)), length)

    def _check(self, texts: list[list[str]], expected: list[Sequence[np.ndarray]], length: int) -> None:
        """Checks that the graph encodes texts to the ids (and token types, if any) in `expected`."""
        import tensorflow as tf

        found = self([tf.constant(column) for column in texts], length)
        for rows, right in zip(found, expected, strict=False):
            for text, row, numbers in zip(texts[0], rows.to_list(), right, strict=True):
                if row != numbers.tolist():
                    raise UserError(
                        f"TensorFlow's operations tokenise {text[:40]!r} differently from this tokenizer:"
                        " export with --signatures=ids and tokenise before the request"
                    )


def renumbered(tokens: tf.Tensor, pad_swap: int | None) -> tf.Tensor:
    """Returns unpadded tokens as models read them (`Tokenizer.own_ids`), from the tokenizer's ids."""
    import tensorflow as tf

    swapped = tokens if pad_swap is None else tf.where(tokens == 0, pad_swap, tokens)
    return tf.where(tokens == (pad_swap or 0), PADDING_TOKEN, swapped)


def _cut(texts: list[tf.RaggedTensor], room: int) -> list[tf.RaggedTensor]:
    """Truncates texts [B, None] to at most `room` tokens together; of two texts, the longer is cut first."""
    import tensorflow as tf

    lengths = [text.row_lengths() for text in texts]
    kept = [tf.minimum(lengths[0], room)]
    if len(texts) == 2:
        half, first_is_longer = room // 2, lengths[0] > lengths[1]
        shorter = tf.minimum(tf.minimum(*lengths), half)
        kept = [tf.where(longer, room - shorter, shorter) for longer in (first_is_longer, ~first_is_longer)]
        kept = [tf.minimum(k, length) for k, length in zip(kept, lengths, strict=True)]
    return [
        tf.gather(text.flat_values, tf.ragged.range(text.row_starts(), text.row_starts() + k))
        for text, k in zip(texts, kept, strict=True)
    ]


class _SentencePiece:
    def __init__(self, content: bytes):
        import tensorflow as tf
        import tensorflow_text

        self.state = tf.Module()
        self.state.tokenizer = tensorflow_text.SentencepieceTokenizer(content, out_type=tf.int32)

    def __call__(self, texts: tf.Tensor) -> tf.RaggedTensor:
        return self.state.tokenizer.tokenize(texts)


def require_tensorflow_text() -> None:
    """Imports TensorFlow Text, whose operations the graph contains."""
    try:
        import tensorflow_text  # noqa: F401
    # TensorFlow raises e.g. NotFoundError if TensorFlow Text was built for another TensorFlow.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"text signatures need tensorflow-text ({reason}): {how_to_install('seqio')};"
            " or export with --signatures=ids"
        ) from error


class _Part(NamedTuple):
    """A part of a sequence, a text or a special token, and the part's token type."""

    type: int
    special: int | None = None


def _template(text: str, num_texts: int) -> list[_Part]:
    """Returns the order of texts and special tokens in a sequence of `num_texts` texts."""
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoded = tokenizer.encode(*["a"] * num_texts)
    rows = zip(encoded.sequence_ids, encoded.type_ids, encoded.ids, strict=True)
    parts = {
        (at if of is None else f"text {of}"): _Part(type, id if of is None else None)
        for at, (of, type, id) in enumerate(rows)
    }
    return list(parts.values())
