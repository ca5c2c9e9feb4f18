"""Tokenizers as TensorFlow operations, for models that are served: texts in, the ids of `Tokenizer` out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tokenizers

from jaxir.asides import temporary_directory
from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.installation import how_to_install
from jaxir.interop.exports.graph_wordpiece import WordPiece

if TYPE_CHECKING:
    import tensorflow as tf


_PROBE = 32  # characters or pieces in a text that is compared


class GraphTokenizer:
    """`tokenizer` in a graph.

    Text that is not valid UTF-8 is refused with an InvalidArgumentError.

    When made it is compared with `tokenizer` on every piece of the vocabulary, every character of Unicode's
    first two planes and many of the others.

    Attributes:
      state: the `tf.Module` that a SavedModel must hold.

    Raises:
      UserError: the tokenizer is of a kind that no TensorFlow operation can follow, or tensorflow_text is
        not installed.
    """

    def __init__(self, tokenizer: Tokenizer):
        require_tensorflow_text()
        self._pad = tokenizer.pad_swap
        with temporary_directory() as directory:
            tokenizer.save(directory)
            path = directory / "tokenizer.json"
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                self._pieces: Any = WordPiece(json.loads(text))
                self._before, self._after = _special_ids(text)
            else:
                (model,) = directory.glob("*.model")
                self._pieces = _SentencePiece(model.read_bytes())
                self._before, self._after = [], tokenizer.encode_batch([""], max_length=2)[0].tolist()
        self.state = self._pieces.state
        self._compare(tokenizer)

    def __call__(self, texts: tf.Tensor, max_length: int) -> tf.RaggedTensor:
        """Returns what `Tokenizer.encode_batch` does: int32 [B, None], special tokens in, no padding.

        Args:
          texts: UTF-8 [B].
          max_length: tokens, special ones included, that are kept of a text.
        """
        import tensorflow as tf

        kept = max_length - len(self._before) - len(self._after)
        valid = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="strict")
        ids = self._pieces(valid)[:, :kept]
        rows = tf.shape(texts)[0]
        around = [tf.tile(tf.constant([s], tf.int32), [rows, 1]) for s in (self._before, self._after)]
        ids = tf.concat([around[0], ids, around[1]], axis=1)
        if self._pad is None:
            return ids
        flat = ids.flat_values
        swapped = tf.where(flat == 0, self._pad, tf.where(flat == self._pad, 0, flat))
        return ids.with_flat_values(swapped)

    def _compare(self, tokenizer: Tokenizer) -> None:
        import tensorflow as tf

        planes = (range(0xD800), range(0xE000, 0x20000), range(0x20000, 0x110000, 61))
        characters = [chr(c) for plane in planes for c in plane]
        pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
        length = 8 * _PROBE
        for parts in (characters, pieces):
            texts = [" ".join(parts[start : start + _PROBE]) for start in range(0, len(parts), _PROBE)]
            found = self(tf.constant(texts), length).to_list()
            for text, ids, expected in zip(
                texts, found, tokenizer.encode_batch(texts, max_length=length), strict=True
            ):
                if ids != expected.tolist():
                    raise UserError(
                        f"TensorFlow's operations tokenise {text[:40]!r} otherwise than this tokenizer:"
                        " export with --signatures=ids and tokenise before the request"
                    )


class _SentencePiece:
    """A SentencePiece model in T5's convention, by tensorflow_text's own operation."""

    def __init__(self, content: bytes):
        import tensorflow as tf
        import tensorflow_text

        self.state = tf.Module()
        self.state.tokenizer = tensorflow_text.SentencepieceTokenizer(content, out_type=tf.int32)

    def __call__(self, texts: tf.Tensor) -> tf.RaggedTensor:
        return self.state.tokenizer.tokenize(texts)


def require_tensorflow_text() -> None:
    """Imports TensorFlow Text, whose operations stand in the graph.

    Raises:
      UserError: it is not installed, or not for the TensorFlow that is.
    """
    try:
        import tensorflow_text  # noqa: F401
    except Exception as error:  # an operation library for another TensorFlow raises NotFoundError
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"text signatures need tensorflow-text ({reason}): {how_to_install('seqio')};"
            " or export with --signatures=ids"
        ) from error


def _special_ids(text: str) -> tuple[list[int], list[int]]:
    """Returns the special tokens that stand before and after each text, as the tokenizer itself says."""
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    plain, whole = (tokenizer.encode("a", add_special_tokens=s).ids for s in (False, True))
    at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:at], whole[at + len(plain) :]
