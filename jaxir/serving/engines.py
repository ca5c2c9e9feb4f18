"""Engines answer batches of questions: a model with its indexes, or an index that is searched by text."""

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
    """A text, and the names of the indexes to search with it; no names if only its vector is wanted."""

    text: str
    indexes: frozenset[str] = frozenset()
    tower: Tower = "query"


class Found(NamedTuple):
    """An index's results for a question: ids and scores, best first, and the milliseconds of its batch."""

    ids: list[str]
    scores: list[float]
    encode_ms: float
    search_ms: float


class Answer(NamedTuple):
    """An engine's answer to one question."""

    vector: np.ndarray | None  # the text's vector, [D]; None from a sparse engine
    found: dict[str, Found]  # results by index name
    cut_at: int | None = None  # number of the text's characters that the model read; None if all


class DenseEngine:
    """Answers questions with a model and the indexes of its vectors; encodes equal texts of a batch once.

    `k` is the number of documents that every search returns.
    """

    towers = TOWERS

    def __init__(self, encoder: DualEncoder, indexes: Mapping[str, Index], *, k: int):
        self.name = ",".join(indexes)
        self._encoder, self._indexes, self._k = encoder, indexes, k
        self._shapes = FewShapes(encoder.model)
        # Towers with shared weights use the same compiled programs, whatever their maximum lengths.
        alike = encoder.model.config.sharing == "sde"
        self._functions = {tower: EMBED["query" if alike else tower] for tower in TOWERS}
        self.texts_cut: dict[Tower, int] = dict.fromkeys(TOWERS, 0)  # number of truncated texts

    def warm_up(self, max_batch: int) -> None:
        """Compiles the programs for texts of both towers and for searches of up to `max_batch` queries."""
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

        Also returns, for each text, the number of characters that the model read, None if all.
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
        """Encodes questions, all of one tower, and searches the indexes that they name."""
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
    """Answers questions with an index that is searched by text; every search returns `k` documents."""

    towers = ("query",)

    def __init__(self, name: str, searcher: Searcher, *, k: int):
        self.name, self._searcher, self._k = name, searcher, k

    def warm_up(self, max_batch: int) -> None:
        """Runs a few searches, so that Java's just-in-time compiler compiles their code."""
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
    """Pads vectors [Q, D] with copies of the last row to a power of two: indexes compile for each Q."""
    missing = (1 << (len(vectors) - 1).bit_length()) - len(vectors)
    return np.pad(vectors, [(0, missing), (0, 0)], mode="edge")


def _ms(started: float) -> float:
    return 1000 * (time.perf_counter() - started)
