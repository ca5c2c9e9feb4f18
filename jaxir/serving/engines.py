"""Engines answer batches of questions, behind one batcher each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxir.retrieval.encoding.text_encoder import EMBED, DualEncoder, Tower
from jaxir.retrieval.indexes.base_index import Index
from jaxir.retrieval.searcher import Searcher
from jaxir.serving.few_shapes import FewShapes

TOWERS: tuple[Tower, ...] = ("query", "passage")


class Question(NamedTuple):
    """A text, and the names of the indexes to search; none if only its vector is wanted."""

    text: str
    indexes: frozenset[str] = frozenset()
    tower: Tower = "query"


class Found(NamedTuple):
    """Results of an index: ids and scores, best first, and the milliseconds of its batch."""

    ids: list[str]
    scores: list[float]
    encode_ms: float
    search_ms: float


class Answer(NamedTuple):
    """Answer of an engine to a question."""

    vector: np.ndarray | None  # of the text, [D]; None for a sparse engine
    found: dict[str, Found]  # by index name
    cut_at: int | None = None  # number of characters that the model read; None if all


class DenseEngine:
    """A model and the indexes of its vectors; every distinct text is encoded once.

    `k` is the depth of every search.
    """

    towers = TOWERS

    def __init__(self, encoder: DualEncoder, indexes: Mapping[str, Index], *, k: int):
        self.name = ",".join(indexes)
        self._encoder, self._indexes, self._k = encoder, indexes, k
        self._shapes = FewShapes(encoder.model)
        # Towers with shared weights share programs, though queries and passages may differ in length.
        alike = encoder.model.config.sharing == "sde"
        self._functions = {tower: EMBED["query" if alike else tower] for tower in TOWERS}
        self.texts_cut: dict[Tower, int] = dict.fromkeys(TOWERS, 0)  # texts beyond the model's length

    def warm_up(self, max_batch: int) -> None:
        """Compiles everything for texts of both towers and batches of up to `max_batch` queries."""
        for tower in TOWERS:
            self._shapes.compile(self._functions[tower], self._encoder.text_settings(tower)[1])
        for index in self._indexes.values():
            vectors = np.eye(1, self._encoder.dimension, dtype=np.float32)
            rows = 1
            while rows < 2 * max_batch:
                index.search(np.repeat(vectors, rows, axis=0), self._k)
                rows *= 2

    def compiled_shapes(self, tower: Tower) -> int:
        """Returns the number of compiled programs of a tower."""
        wanted = self._functions[tower]
        return sum(function is wanted for function, _, _ in tuple(self._shapes.compiled))

    def encode(self, texts: list[str], tower: Tower) -> tuple[np.ndarray, list[int | None]]:
        """Returns vectors of N texts, float32 [N, D], equal to those of `DualEncoder.encode` up to rounding.

        Also returns the number of characters that the model read of each text, None if all.
        """
        encoder = self._encoder
        tokens, (prompt, max_length) = encoder.tokens(texts, tower), encoder.text_settings(tower)
        cuts: list[int | None] = [None] * len(texts)
        for row, text in enumerate(texts):
            if len(tokens[row]) == max_length:
                cut = encoder.tokenizer.cut_at(prompt + text, max_length=max_length)
                cuts[row] = None if cut is None else max(0, cut - len(prompt))
        self.texts_cut[tower] += sum(cut is not None for cut in cuts)
        vectors = self._shapes.run(
            self._functions[tower], tokens, max_length=max_length, of=(encoder.dimension,)
        )
        return encoder.checked(vectors), cuts

    def answer(self, questions: list[Question]) -> list[Answer]:
        """Answers questions of one tower."""
        texts = {text: row for row, text in enumerate(dict.fromkeys(q.text for q in questions))}
        started = time.perf_counter()
        vectors, cuts = self.encode(list(texts), questions[0].tower)
        encode_ms = _ms(started)
        answers = [Answer(vectors[texts[q.text]], {}, cuts[texts[q.text]]) for q in questions]
        for name, index in self._indexes.items():
            row_of: dict[str, int] = {}
            for q in questions:
                if name in q.indexes:
                    row_of.setdefault(q.text, len(row_of))
            if not row_of:
                continue
            started = time.perf_counter()
            scores, ids = index.search(_power_of_two(vectors[[texts[t] for t in row_of]]), self._k)
            search_ms = _ms(started)
            for question, answer in zip(questions, answers, strict=True):
                if name in question.indexes:
                    row = row_of[question.text]
                    answer.found[name] = _found(ids[row], scores[row], encode_ms, search_ms)
        return answers


class SparseEngine:
    """An index that is searched with texts; `k` is the depth of every search."""

    towers = ("query",)

    def __init__(self, name: str, searcher: Searcher, *, k: int):
        self.name, self._searcher, self._k = name, searcher, k

    def warm_up(self, max_batch: int) -> None:
        """Runs searches, so that Java compiles the code that they use."""
        for number in range(4):
            self._searcher.search([f"a first question {number}"] * max_batch, self._k)

    def answer(self, questions: list[Question]) -> list[Answer]:
        texts = {text: row for row, text in enumerate(dict.fromkeys(q.text for q in questions))}
        started = time.perf_counter()
        scores, ids = self._searcher.search(list(texts), self._k)
        search_ms = _ms(started)
        rows = [texts[q.text] for q in questions]
        return [Answer(None, {self.name: _found(ids[r], scores[r], 0.0, search_ms)}) for r in rows]


def _found(ids: list[str], scores: np.ndarray, encode_ms: float, search_ms: float) -> Found:
    return Found(ids, scores[: len(ids)].tolist(), encode_ms, search_ms)


def _power_of_two(vectors: np.ndarray) -> np.ndarray:
    """Pads [Q, D] with its last row to a power of two, because engines compile for each Q."""
    missing = (1 << (len(vectors) - 1).bit_length()) - len(vectors)
    return np.pad(vectors, [(0, missing), (0, 0)], mode="edge")


def _ms(started: float) -> float:
    return 1000 * (time.perf_counter() - started)
