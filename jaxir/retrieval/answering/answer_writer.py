"""`Reader`: questions with passages in, answers out (Fusion-in-Decoder, Izacard & Grave 2021)."""

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

_MULTIPLE = 8  # of tokens that a question's passages are padded to, so that few programs are compiled
WINDOW = 128  # questions that are batched together, and lost at most by an interruption


@functools.lru_cache(maxsize=16)
def _answers(how: Decoding, passages: int) -> Callable[[Seq2SeqModel, jax.Array], jax.Array]:
    """Returns the function that answers so: the same for the same settings, as programs are kept by it."""

    def outputs(model: Seq2SeqModel, ids: jax.Array) -> jax.Array:
        rows, columns = ids.shape
        length = -(-columns // passages)
        ids = jnp.pad(ids, ((0, 0), (0, length * passages - columns)))
        return model.generate(ids.reshape(rows, length, passages).swapaxes(1, 2), how)

    return outputs


class Reader(Generator):
    """A generator that answers questions from passages; loaded and saved as any `Generator`."""

    def answer(
        self,
        questions: Questions,
        examples: np.ndarray,
        how: Decoding,
        *,
        num_windows: int = 1,
        on_batch: Callable[[int], Any] | None = None,
    ) -> list[list[str]]:
        """Answers questions.

        Args:
          examples: [N], which are answered.
          num_windows: how many such calls there will be about (see `Runner.run`).
          on_batch: called with the number of questions of each batch when it is done.

        Returns:
          The outputs of each, the best first; there is none where nothing is said.

        Raises:
          UserError: the model gives logits that are not finite.
        """
        # A row has the first tokens of all passages, then their second ones, and so on: what pads it at the
        # end pads each passage, so that a question is as long as its longest one in any batch.
        sources = questions.sources(examples)
        longest = longest_of(sources)
        longest = np.minimum(-(-longest // _MULTIPLE) * _MULTIPLE, questions.length)
        tokens = self.runner.run(
            _answers(how, questions.passages),
            [ids[:, :length].T.reshape(-1) for ids, length in zip(sources, longest, strict=True)],
            of=(how.num_outputs, how.max_new_tokens),
            dtype=np.int32,
            num_windows=num_windows,
            on_batch=on_batch,
        )
        return self.written(tokens)


def longest_of(sources: np.ndarray) -> np.ndarray:
    """Returns the length of the longest passage of each question [B], of token ids [B, P, L]."""
    return (sources != 0).sum(-1).max(-1)


class _Asked(NamedTuple):
    """A question by its id and its number."""

    id: str
    number: int


def write_answers(
    reader: Reader, questions: Questions, output: str | Path, how: Decoding, *, window: int = WINDOW
) -> OutputsReport | None:
    """Writes {"_id", "outputs"} for each question, in their order; the file appears only when whole.

    Run again after an interruption it continues; several processes of one run share the work.

    Args:
      reader: the model, on devices of this process.
      window: questions that are batched together.

    Returns:
      What is in the file, in the first process; None in the others.

    Raises:
      UserError: what was begun there is something else or damaged, or another run is writing it.
    """
    count = len(questions)

    def make(batch: Sequence[_Asked], done: Callable[[int], None]) -> Iterator[dict[str, Any]]:
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
        (_Asked(query_id, number) for number, query_id in enumerate(questions.ids)),
        make,
        count=count,
        what="answering questions",
        window=window,
    )
