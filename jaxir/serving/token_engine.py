"""Encodes texts with a multi-vector or a sparse encoder, for `/encode` and similar paths."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxir.retrieval.encoding.fixed_dimension_encoder import FixedDimensionEncoder
from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder, HybridTexts
from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder
from jaxir.retrieval.encoding.text_encoder import Tower
from jaxir.serving.engines import TOWERS, Answer, Question

TokenEncoder = HybridEncoder | MultiVectorEncoder | SparseEncoder | FixedDimensionEncoder


class Heads(NamedTuple):
    """A hybrid encoder's encoding of a text.

    Attributes:
      dense: the vector [D].
      sparse: {token: weight}.
      tokens: the vectors of the tokens [tokens, Dt].
    """

    dense: np.ndarray
    sparse: dict[str, float]
    tokens: np.ndarray


class TokenEngine:
    """Answers questions by encoding their texts, without a search.

    `Answer.vector` depends on the encoder. A multi-vector encoder gives an array [tokens, D], or [F] if its
    tokens become one vector; a sparse encoder {token: weight}; a hybrid encoder `Heads`.

    Attributes:
      name: the engine's name in metrics.
      encoder: the model.
    """

    towers = TOWERS

    def __init__(self, encoder: TokenEncoder, *, name: str):
        self.encoder, self.name = encoder, name

    def prepare(self, max_batch: int) -> None:
        """Compiles the programs of a short text of each tower."""
        for tower in TOWERS:
            self.answer([Question("a first text", tower=tower)])

    def compile_rest(self, stop: threading.Event | None = None) -> None:
        """Does nothing: other shapes are compiled when a request needs them."""

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Encodes questions, all of one tower; their prompts are the tower's own."""
        tower = questions[0].tower
        rows = {text: row for row, text in enumerate(dict.fromkeys(q.text for q in questions))}
        vectors = self._encoded(list(rows), tower)
        prompt, max_length = self.encoder.text_settings(tower)
        sparse = isinstance(self.encoder, SparseEncoder)
        tokenizer = self.encoder.tokenizer_of(tower) if sparse else self.encoder.tokenizer
        read = [_read(tokenizer, text, prompt, max_length) for text in rows]
        found = [Answer(vector, {}, *of_text) for vector, of_text in zip(vectors, read, strict=True)]
        return [found[rows[q.text]] for q in questions]

    def _encoded(self, texts: list[str], tower: Tower) -> list[Any]:
        found = self.encoder.encode(texts, tower=tower, show_progress=False)
        if isinstance(found, HybridTexts):
            parts = found.dense, self.encoder.token_weights(found.sparse), found.tokens
            return [Heads(*of_text) for of_text in zip(*parts, strict=True)]
        return self.encoder.token_weights(found) if isinstance(self.encoder, SparseEncoder) else list(found)


def _read(tokenizer: Any, text: str, prompt: str, max_length: int) -> tuple[int | None, int]:
    """Returns how many characters of a text a model reads, None if all, and the number of tokens."""
    count = len(tokenizer.encode_batch([prompt + text], max_length=max_length)[0])
    cut = tokenizer.cut_at(prompt + text, max_length=max_length) if count == max_length else None
    return None if cut is None else max(0, cut - len(prompt)), count
