"""`Reader`: writes answers to questions with passages (Fusion-in-Decoder, Izacard & Grave 2021)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxir.models.decoding import Decoding
from jaxir.models.seq2seq import Seq2SeqModel
from jaxir.retrieval.answering.questions import Questions
from jaxir.retrieval.encoding.generator import Generator
from jaxir.retrieval.encoding.outputs_file import made_by
from jaxir.retrieval.encoding.windowed_file import OutputsReport, write_windows
from jaxir.storage.files import local_path

_MULTIPLE = 8  # passages are padded to a multiple of this number of tokens, so that few programs are compiled
WINDOW = 128  # questions batched together; an interruption loses at most one window


@functools.lru_cache(maxsize=16)  # a function object has its own programs, so equal settings must share it
def _answer_function(how: Decoding, passages: int) -> Callable[[Seq2SeqModel, jax.Array], jax.Array]:
    def outputs(model: Seq2SeqModel, ids: jax.Array) -> jax.Array:
        rows, columns = ids.shape
        length = -(-columns // passages)
        ids = jnp.pad(ids, ((0, 0), (0, length * passages - columns)))
        return model.generate(ids.reshape(rows, length, passages).swapaxes(1, 2), how)

    return outputs


class Reader(Generator):
    """A generator that answers questions from passages; loaded and saved like any `Generator`."""

    def answer(
        self,
        questions: Questions,
        examples: np.ndarray,
        how: Decoding,
        *,
        num_windows: int = 1,
        on_batch: Callable[[int], Any] | None = None,
    ) -> list[list[str]]:
        """Returns outputs for the questions with numbers `examples` [N]: best first, no empty outputs."""
        # A row interleaves the passages: the first tokens of all passages, then the second tokens, and so on.
        # Padding added at the end of a row is then split evenly over its passages.
        sources = questions.sources(examples)
        longest = longest_of(sources)
        longest = np.minimum(-(-longest // _MULTIPLE) * _MULTIPLE, questions.length)
        tokens = self.runner.run(
            _answer_function(how, questions.passages),
            [ids[:, :length].T.reshape(-1) for ids, length in zip(sources, longest, strict=True)],
            row_shape=(how.num_outputs, how.max_new_tokens),
            dtype=np.int32,
            num_windows=num_windows,
            on_batch=on_batch,
        )
        return self.written(tokens)


def longest_of(sources: np.ndarray) -> np.ndarray:
    """Returns the number of tokens of each question's longest passage, [B], from token ids [B, P, L]."""
    return (sources != 0).sum(-1).max(-1)


class _Question(NamedTuple):
    id: str
    number: int


def write_answers(
    reader: Reader, questions: Questions, output: str | Path, how: Decoding, *, window: int = WINDOW
) -> OutputsReport | None:
    """Writes a line {"_id", "outputs"} for each question, in order (see `write_windows`)."""
    count = len(questions)

    def make(batch: Sequence[_Question], done: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        examples = np.array([one.number for one in batch], np.int64)
        found = reader.answer(questions, examples, how, num_windows=-(-count // window), on_batch=done)
        return ({"outputs": outputs} for outputs in found)

    return write_windows(
        local_path(output, "written to"),
        {
            **made_by(reader, how),
            "max_length": questions.length,
            "input": questions.fingerprint,
            "window": window,
        },
        (_Question(query_id, number) for number, query_id in enumerate(questions.ids)),
        make,
        count=count,
        what="answering questions",
        window=window,
    )
