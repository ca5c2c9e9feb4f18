"""Engines answer batches of questions: a model with its indexes, or an index that is searched by text."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxir.models import packed
from jaxir.retrieval.encoding.batch_runner import RUNNERS, Function
from jaxir.retrieval.encoding.text_encoder import DualEncoder, Tower
from jaxir.retrieval.encoding.tower_functions import EMBED, PACKED
from jaxir.retrieval.indexes.base_index import Index, normalize
from jaxir.retrieval.searcher import Searcher
from jaxir.serving.few_shapes import FewShapes
from jaxir.serving.packed_shapes import LOOK, PackedShapes, chosen

TOWERS: tuple[Tower, ...] = ("query", "passage")


class Question(NamedTuple):
    """A text to encode, and how to encode it.

    `indexes` are the names of the indexes to search with it; without names only its vector is returned. Each
    search returns `depth` documents; None: the engine's `k`. `prompt` is put before the text; None: the
    tower's prompt. Without `is_normalized`, the vector keeps its length, even if the similarity is cosine.
    """

    text: str
    indexes: frozenset[str] = frozenset()
    tower: Tower = "query"
    prompt: str | None = None
    is_normalized: bool = True
    depth: int | None = None


class Found(NamedTuple):
    """An index's results for a question: ids and scores, best first, and the milliseconds of its batch."""

    ids: list[str]
    scores: list[float]
    encode_ms: float
    search_ms: float


class Answer(NamedTuple):
    """An engine's answer to one question."""

    vector: Any  # the text's vector [D], or the output of a `TokenEngine`; None from a `SparseEngine`
    found: dict[str, Found]  # results by index name
    cut_at: int | None = None  # number of the text's characters that the model read; None if all
    tokens: int = 0  # number of tokens that the model read


class Encoded(NamedTuple):
    """Vectors of N texts (float32 [N, D]), and for each text its `Answer.cut_at` and `Answer.tokens`."""

    vectors: np.ndarray
    cuts: list[int | None]
    tokens: list[int]


class Read(NamedTuple):
    """A question with its text's token ids, and `Answer.cut_at`."""

    question: Question
    ids: np.ndarray
    cut_at: int | None


class DenseEngine:
    """Answers questions with a model and the indexes of its vectors; encodes equal texts of a batch once.

    `k` is the number of documents that a search returns by default. `name` is used in metrics; None: the
    names of the indexes. `threads` is the number of batches that may run at once. On a CPU, a BERT model
    reads texts that share rows (`packed_shapes`); other models read padded texts.
    """

    towers = TOWERS

    def __init__(
        self, encoder: DualEncoder, indexes: Mapping[str, Index], *, k: int, name: str | None = None
    ):
        self.name = name or ",".join(indexes)
        self.encoder, self._indexes, self._k = encoder, indexes, k
        packs = jax.default_backend() == "cpu" and all(packed.packs(encoder.model, t) for t in TOWERS)
        self._shapes, functions = (PackedShapes, PACKED) if packs else (FewShapes, EMBED)
        self.threads = RUNNERS if packs else 1
        # Towers with shared weights use the same compiled programs, whatever their maximum lengths.
        alike = encoder.model.config.sharing == "sde"
        self._functions: dict[Tower, Function] = {
            tower: functions["query" if alike else tower] for tower in TOWERS
        }
        self._variants: dict[int, FewShapes] = {}  # key: number of prompt tokens that are not pooled
        self._search_lock = threading.Lock()
        self._lock = threading.Lock()  # protects `_variants` and `texts_cut`
        self.texts_cut: dict[Tower, int] = dict.fromkeys(TOWERS, 0)  # number of truncated texts

    def prepare(self, max_batch: int) -> None:
        """Compiles what the first request needs: two shapes of each tower, and the searches of indexes."""
        for tower in TOWERS:
            shapes = self._variant(self._prompt_tokens(self.encoder.text_settings(tower)[0]))
            shapes.prepare(self._functions[tower], self.encoder.text_settings(tower)[1])
        for index in self._indexes.values():
            vectors = np.eye(1, self.encoder.dimension, dtype=np.float32)
            rows = 1
            while rows < 2 * max_batch:
                index.search(np.repeat(vectors, rows, axis=0), self._k)
                rows *= 2

    def compile_rest(self, stop: threading.Event | None = None) -> None:
        """Compiles the other shapes of programs in use, until `stop` is set; runs beside requests."""
        for shapes in tuple(self._variants.values()):
            for tower in TOWERS:
                shapes.compile(self._functions[tower], self.encoder.text_settings(tower)[1], stop=stop)

    def warm_up(self, max_batch: int) -> None:
        """Compiles all programs."""
        self.prepare(max_batch)
        self.compile_rest()

    def compiled_shapes(self, tower: Tower) -> int:
        """Returns the number of compiled programs of a tower."""
        wanted = self._functions[tower]
        variants = tuple(self._variants.values())
        return sum(function is wanted for shapes in variants for function, _, _ in shapes.compiled)

    def encode(self, texts: Sequence[str], tower: Tower) -> Encoded:
        """Returns vectors of N texts, equal to those of `DualEncoder.encode` up to rounding."""
        encoded = self._encode(self.read([Question(text, tower=tower) for text in texts]))
        return encoded._replace(vectors=self._compared(encoded.vectors))

    def read(self, questions: Sequence[Question]) -> list[Read]:
        """Tokenises questions, all of one tower."""
        encoder, tower = self.encoder, questions[0].tower
        own_prompt, max_length = encoder.text_settings(tower)
        prompts = [own_prompt if q.prompt is None else q.prompt for q in questions]
        whole = [prompt + q.text for prompt, q in zip(prompts, questions, strict=True)]
        tokens = encoder.tokenizer.encode_batch(whole, max_length=max_length)
        cuts: list[int | None] = [None] * len(questions)
        for row, text in enumerate(whole):
            if len(tokens[row]) == max_length:
                cut = encoder.tokenizer.cut_at(text, max_length=max_length)
                cuts[row] = None if cut is None else max(0, cut - len(prompts[row]))
        with self._lock:
            self.texts_cut[tower] += sum(cut is not None for cut in cuts)
        return [Read(*each) for each in zip(questions, tokens, cuts, strict=True)]

    def chosen(self, waiting: Sequence[Read], idle: int) -> Sequence[int]:
        """Returns which of the waiting questions form the next batch (see `Batcher`)."""
        if self._shapes is FewShapes:
            return range(len(waiting))
        max_length = self.encoder.text_settings(waiting[0].question.tower)[1]
        return chosen([len(read.ids) for read in waiting[:LOOK]], idle, max_length)

    def _encode(self, reads: Sequence[Read]) -> Encoded:
        """Encodes questions, all of one tower; their vectors are not normalised."""
        encoder, tower = self.encoder, reads[0].question.tower
        own_prompt, max_length = encoder.text_settings(tower)
        rows_of: dict[int, list[int]] = {}
        for row, read in enumerate(reads):
            prompt = own_prompt if read.question.prompt is None else read.question.prompt
            rows_of.setdefault(self._prompt_tokens(prompt), []).append(row)
        vectors = np.empty([len(reads), encoder.dimension], np.float32)
        for prompt_tokens, rows in rows_of.items():
            vectors[rows] = self._variant(prompt_tokens).run(
                self._functions[tower],
                [reads[row].ids for row in rows],
                max_length=max_length,
                of=(encoder.dimension,),
            )
        return Encoded(
            encoder.checked(vectors), [read.cut_at for read in reads], [len(read.ids) for read in reads]
        )

    def answer(self, reads: Sequence[Read]) -> list[Answer]:
        """Encodes questions, all of one tower, and searches the indexes that they name."""
        questions = [read.question for read in reads]
        first = {_text_of(q): n for n, q in reversed(list(enumerate(questions)))}
        rows = {key: row for row, key in enumerate(first)}
        started = time.perf_counter()
        encoded = self._encode([reads[n] for n in first.values()])
        vectors = self._compared(encoded.vectors)
        encode_ms = _ms(started)
        at = [rows[_text_of(q)] for q in questions]
        answers = []
        for row, question in zip(at, questions, strict=True):
            of_question = vectors if question.is_normalized else encoded.vectors
            answers.append(Answer(of_question[row], {}, encoded.cuts[row], encoded.tokens[row]))
        for name, index in self._indexes.items():
            for depth in {q.depth or self._k for q in questions if name in q.indexes}:
                wanted = [
                    n for n, q in enumerate(questions) if name in q.indexes and (q.depth or self._k) == depth
                ]
                place = {row: n for n, row in enumerate(dict.fromkeys(at[n] for n in wanted))}
                started = time.perf_counter()
                with self._search_lock:
                    scores, ids = index.search(_power_of_two(vectors[list(place)]), depth)
                search_ms = _ms(started)
                for n in wanted:
                    row = place[at[n]]
                    answers[n].found[name] = _found(ids[row], scores[row], encode_ms, search_ms)
        return answers

    def _prompt_tokens(self, prompt: str) -> int:
        """Returns the number of tokens at the start of a text that pooling leaves out."""
        return 0 if self.encoder.settings.pools_prompts else self.encoder.tokenizer.prompt_length(prompt)

    def _variant(self, prompt_tokens: int) -> FewShapes:
        """Returns the model's programs for texts whose first `prompt_tokens` tokens are not pooled.

        The programs do not normalise, so that requests with and without normalised vectors share batches.
        """
        with self._lock:
            if prompt_tokens not in self._variants:
                model = self.encoder.model.unnormalized()
                counts = {"query_prompt_tokens": prompt_tokens, "passage_prompt_tokens": prompt_tokens}
                config = dataclasses.replace(model.config, **counts)
                self._variants[prompt_tokens] = self._shapes(model.with_config(config))
            return self._variants[prompt_tokens]

    def _compared(self, vectors: np.ndarray) -> np.ndarray:
        """Returns vectors as the model's similarity compares them: of length 1 for cosine."""
        return normalize(vectors) if self.encoder.similarity_fn_name == "cosine" else vectors


def _text_of(question: Question) -> tuple[str, Tower, str | None]:
    """Returns what decides a question's tokens; questions with equal values are encoded once."""
    return question.text, question.tower, question.prompt


class SparseEngine:
    """Answers questions with an index that is searched by texts; every search returns `k` documents."""

    towers = ("query",)

    def __init__(self, name: str, searcher: Searcher, *, k: int):
        self.name, self._searcher, self._k = name, searcher, k

    def prepare(self, max_batch: int) -> None:
        """Runs a few searches, so that Java compiles its code, or a multi-vector encoder its programs."""
        rows = 1
        while rows <= max_batch:
            self._searcher.search(["a first question"] * rows, self._k)
            rows *= 2

    def compile_rest(self, stop: threading.Event | None = None) -> None:
        """Does nothing: there are no programs to compile."""

    def answer(self, questions: list[Question]) -> list[Answer]:
        texts = {text: row for row, text in enumerate(dict.fromkeys(q.text for q in questions))}
        depth = max(q.depth or self._k for q in questions)
        started = time.perf_counter()
        scores, ids = self._searcher.search(list(texts), depth)
        search_ms = _ms(started)
        rows = [texts[q.text] for q in questions]
        return [Answer(None, {self.name: _found(ids[r], scores[r], 0.0, search_ms)}) for r in rows]


def _found(ids: list[str], scores: np.ndarray, encode_ms: float, search_ms: float) -> Found:
    return Found(ids, scores[: len(ids)].tolist(), encode_ms, search_ms)


def _power_of_two(vectors: np.ndarray) -> np.ndarray:
    """Pads vectors [Q, D] to a power of two of rows (copies of the last), as indexes compile for each Q."""
    missing = (1 << (len(vectors) - 1).bit_length()) - len(vectors)
    return np.pad(vectors, [(0, missing), (0, 0)], mode="edge")


def _ms(started: float) -> float:
    return 1000 * (time.perf_counter() - started)
