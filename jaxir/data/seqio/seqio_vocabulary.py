"""A `Tokenizer` as a SeqIO vocabulary. The class is created lazily, because SeqIO imports TensorFlow."""

from __future__ import annotations

import functools
from typing import Any

from jaxir.runtime.lean_tensorflow import import_tensorflow


def __getattr__(name: str) -> Any:
    if name == "HuggingFaceVocabulary":
        return _vocabulary_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _vocabulary_class() -> type:
    import numpy as np

    import_tensorflow()
    import seqio
    import tensorflow as tf

    from jaxir.data.text.tokenizer import Tokenizer

    class HuggingFaceVocabulary(seqio.Vocabulary):
        """A SeqIO vocabulary that uses a `Tokenizer` (Hugging Face or SentencePiece).

        Ids are those that the model expects. They include special tokens, so SeqIO must not append an EOS:
        `eos_id` is None.
        """

        def __init__(self, tokenizer: Tokenizer, *, max_length: int):
            super().__init__()
            self.tokenizer, self.max_length = tokenizer, max_length

        eos_id = unk_id = bos_id = None

        @property
        def _base_vocab_size(self) -> int:
            return self.tokenizer.vocab_size

        def _encode(self, s: str) -> list[int]:
            return self.tokenizer.encode_batch([s], max_length=self.max_length)[0].tolist()

        def _decode(self, ids: Any) -> str:
            return self.tokenizer.decode(ids)

        def _encode_tf(self, s: Any) -> Any:
            # `text` is an array in TensorFlow's eager mode.
            def encode(text: bytes | np.ndarray) -> np.ndarray:
                value = text if isinstance(text, bytes) else text.item()
                return np.array(self._encode(value.decode()), np.int32)

            ids = tf.numpy_function(encode, [tf.convert_to_tensor(s)], tf.int32)
            ids.set_shape([None])
            return ids

        def _decode_tf(self, ids: Any) -> Any:
            text = tf.numpy_function(lambda row: self._decode(row).encode(), [ids], tf.string)
            text.set_shape([])
            return text

        def __eq__(self, other: object) -> bool:
            return (
                isinstance(other, HuggingFaceVocabulary)
                and self.tokenizer.fingerprint == other.tokenizer.fingerprint
                and self.max_length == other.max_length
            )

        def __hash__(self) -> int:
            return hash((self.tokenizer.fingerprint, self.max_length))

    return HuggingFaceVocabulary
