"""`DualEncoder`: encodes queries and passages as vectors."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from jaxir.core.errors import UserError
from jaxir.core.platforms import local_devices
from jaxir.core.progress import progress
from jaxir.data.text.truncation import Truncation
from jaxir.interop import model_dir
from jaxir.interop.model import stored
from jaxir.models.dual_encoder import DualEncoderModel
from jaxir.models.layers import size_of
from jaxir.retrieval.encoding.batch_runner import WINDOW, Runner
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.lengths import UnusableVectorError, first_unusable
from jaxir.retrieval.encoding.made_by import MadeBy
from jaxir.runtime.partitioning import MeshConfig, Partitioner

Tower = Literal["query", "passage"]
T = TypeVar("T")


def _embed_query(model: DualEncoderModel, ids: jax.Array) -> jax.Array:
    return model.encode(ids, tower="query")


def _embed_passage(model: DualEncoderModel, ids: jax.Array) -> jax.Array:
    return model.encode(ids, tower="passage")


EMBED = {"query": _embed_query, "passage": _embed_passage}


class DualEncoder:
    """Encodes queries and passages as vectors.

    Texts are sorted by their number of tokens and batched to a token budget. Batches are split over all
    devices of this process; the next texts are tokenised meanwhile. Vectors are in the order of the texts.

    Attributes:
      model: the `DualEncoderModel`.
      tokenizer: the model's tokenizer.
      settings: maximum lengths and prompts of the two towers.
      fingerprint: identifies the weights and the tokenizer; vectors of two fingerprints must not be compared.
        Computed unless given.
      spec: the name by which the model was loaded; None for a model that was never saved.
      step: the step of the loaded checkpoint, if the model is a training run; else None.
      dimension: D, the number of components of a vector.
      similarity: "cosine" (vectors have length 1) or "dot".
      training: how training ended (a `jaxir.training.loop.TrainResult`), for the result of `fit`; else None.
    """

    training: Any = None

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Any,
        fingerprint: str | None = None,
        *,
        spec: str | None = None,
        step: int | None = None,
        batch_tokens: int | None = None,
        partitioner: Partitioner | None = None,
    ):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.spec, self.step = spec, step
        self.fingerprint: str = fingerprint or model_dir.fingerprint_of(model, tokenizer, settings)
        self.similarity: str = model.config.similarity
        # Each process encodes its own batches on its own devices.
        partitioner = partitioner or MeshConfig().build(local_devices())
        self.runner = Runner(model, partitioner, batch_tokens=batch_tokens)
        self.dimension: int = model.config.dimension

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        batch_tokens: int | None = None,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
    ) -> "DualEncoder":
        """Loads a model.

        Args:
          spec: a jaxir model or run directory, or `st:` or `hf:` and a local directory or hub name.
          dtype: type of the matrix products; vectors are always float32.
          batch_tokens: maximum number of tokens per batch on one device; None uses the platform's default.
          query_max_length: maximum number of tokens per query; None: the model's setting.
          passage_max_length: maximum number of tokens per passage; None: the model's setting.

        Raises:
          UserError: the model does not exist, cannot be read, or has fewer positions than a maximum length.
        """
        loaded = model_dir.load(spec, dtype=dtype)
        lengths = {"query_max_length": query_max_length, "passage_max_length": passage_max_length}
        settings = dataclasses.replace(
            loaded.settings, **{name: length for name, length in lengths.items() if length is not None}
        )
        stored.check_lengths(settings, loaded.model.config, spec)
        return cls(
            loaded.model,
            loaded.tokenizer,
            settings,
            loaded.fingerprint,
            spec=absolute_spec(spec),
            step=loaded.step,
            batch_tokens=batch_tokens,
        )

    def save(self, directory: str | Path) -> None:
        """Writes a model directory, which `load` and every command take; it appears only when complete.

        Raises:
          UserError: `directory` exists and is not empty.
        """
        model_dir.save(directory, self.model, self.tokenizer, self.settings)

    def __repr__(self) -> str:
        name = f"{self.spec!r}: " if self.spec else ""
        settings = self.settings
        return (
            f"DualEncoder({name}{self.model.config.summary}, {size_of(self.model)}, queries of"
            f" {settings.query_max_length} tokens, passages of {settings.passage_max_length})"
        )

    def encode_queries(self, texts: Sequence[str], *, show_progress: bool = True) -> Float[np.ndarray, "N D"]:
        """Returns float32 vectors [N, D] of N queries."""
        return self.encode(texts, tower="query", show_progress=show_progress)

    def encode_passages(
        self, texts: Sequence[str], *, show_progress: bool = True
    ) -> Float[np.ndarray, "N D"]:
        """Returns float32 vectors [N, D] of N passages."""
        return self.encode(texts, tower="passage", show_progress=show_progress)

    def encode(
        self,
        texts: Sequence[str],
        *,
        tower: Tower,
        show_progress: bool = True,
        report: EncodingReport | None = None,
    ) -> Float[np.ndarray, "N D"]:
        """Encodes texts by one tower.

        Args:
          texts: N texts, which may be empty; each is truncated at the tower's maximum length.
          tower: "query" or "passage".
          show_progress: whether to show a progress bar (on a terminal only).
          report: the counts of this call are added to it.

        Returns:
          float32 vectors [N, D] in the order of the texts.

        Raises:
          TypeError: `texts` is one string, or holds something that is not a string.
          UserError: the model gives vectors that are not finite or too long (see `checked`).
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("texts must be a list of strings")
        starts = range(0, len(texts), WINDOW)
        windows = (self.tokens(texts[start : start + WINDOW], tower) for start in starts)
        vectors = np.empty([len(texts), self.dimension], np.float32)
        what = f"encoding {'queries' if tower == 'query' else 'passages'}"
        with progress(total=len(texts), what=what, unit="texts", hidden=not show_progress) as bar:
            start = 0
            parts = self.encode_tokens(
                windows,
                tower=tower,
                num_windows=max(1, len(starts)),
                report=report,
                on_batch=bar.update,
            )
            try:
                for part in parts:
                    vectors[start : start + len(part)] = part
                    start += len(part)
            except UnusableVectorError as error:
                number = start + error.row
                raise UserError(f"{error}: text {number + 1}, {texts[number]!r:.40}") from None
        return vectors

    def encode_tokens(
        self,
        windows: Iterable[list[np.ndarray]],
        *,
        tower: Tower,
        num_windows: int = 1,
        report: EncodingReport | None = None,
        on_batch: Callable[[int], Any] | None = None,
    ) -> Iterator[np.ndarray]:
        """Encodes lists of token ids, each sorted and batched separately; yields float32 [n, D] for each.

        The vectors of a list depend only on the list, the model and the machine, so a stream can resume at
        any list. A thread draws from `windows`, one list ahead.

        Args:
          windows: lists of token ids, from `tokens`.
          tower: "query" or "passage".
          num_windows: the approximate number of lists (see `Runner.run`).
          report: the counts of this call are added to it.
          on_batch: called with the number of texts of each finished batch.
        """
        report = EncodingReport() if report is None else report
        for tokens in _one_ahead(iter(windows)):
            started = time.perf_counter()
            vectors = self.runner.run(
                EMBED[tower],
                tokens,
                row_shape=(self.dimension,),
                num_windows=num_windows,
                report=report,
                on_batch=on_batch,
            )
            self.checked(vectors)
            report.seconds += time.perf_counter() - started
            yield vectors

    def tokens(
        self, texts: Sequence[str], tower: Tower, truncation: Truncation | None = None
    ) -> list[np.ndarray]:
        """Returns the token ids of texts with the tower's prompt, truncated at its maximum length.

        If given, `truncation` counts the texts and the truncated texts.
        """
        prompt, max_length = self.text_settings(tower)
        return self.tokenizer.encode_batch(
            [prompt + text for text in texts], max_length=max_length, truncation=truncation
        )

    def text_settings(self, tower: Tower) -> tuple[str, int]:
        """Returns (prompt, maximum length in tokens) of a tower."""
        settings = self.settings
        if tower == "query":
            return settings.query_prompt, settings.query_max_length
        return settings.passage_prompt, settings.passage_max_length

    @property
    def made_by(self) -> MadeBy:
        return MadeBy(self.spec, self.step)

    def checked(self, vectors: np.ndarray) -> np.ndarray:
        """Returns `vectors`. Raises UnusableVectorError if one is not finite or longer than `LONGEST`."""
        if (found := first_unusable(vectors)) is not None:
            raise UnusableVectorError(f"{self.made_by} gives a vector that", *found)
        return vectors


def absolute_spec(spec: str) -> str:
    """Returns `spec` with an absolute path, if it is a local directory, so that any process can load it."""
    kind, colon, place = spec.partition(":")
    if kind not in model_dir.FORMS:  # the colon is part of the path
        kind, colon, place = "", "", spec
    return f"{kind}{colon}{Path(place).resolve()}" if Path(place).exists() else spec


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields `items`; a thread draws the next item while the consumer uses the present one."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        future: Future[Any] = pool.submit(next, items, end)
        while (item := future.result()) is not end:
            future = pool.submit(next, items, end)
            yield item
