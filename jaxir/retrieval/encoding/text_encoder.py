"""`DualEncoder`: encodes queries and passages as vectors."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.platforms import check_devices, local_devices
from jaxir.core.progress import progress
from jaxir.data.text.truncation import Truncation
from jaxir.interop import model_dir
from jaxir.interop.hub import push
from jaxir.interop.model import stored
from jaxir.models.layers import size_of
from jaxir.models.quantized import Scheme
from jaxir.retrieval.encoding.batch_runner import WINDOW, Runner
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.lengths import UnusableVectorError, first_unusable
from jaxir.retrieval.encoding.loading import check_not_rounded
from jaxir.retrieval.encoding.made_by import MadeBy
from jaxir.retrieval.encoding.read_ahead import one_ahead
from jaxir.retrieval.encoding.tower_functions import EMBED as EMBED
from jaxir.retrieval.encoding.tower_functions import Tower as Tower
from jaxir.retrieval.encoding.tower_functions import embed_after
from jaxir.retrieval.encoding.vector_forms import Precision, check_form, formed, similarities
from jaxir.runtime.cpu import Dtype, settled_dtype
from jaxir.runtime.partitioning import MeshConfig, Partitioner
from jaxir.storage.temporary_outputs import temporary_directory


class DualEncoder:
    """Encodes queries and passages as vectors.

    Texts are sorted by their number of tokens and batched to a token budget. Batches are split over all
    devices of this process; the next texts are tokenised meanwhile. Vectors are in the order of the texts.

    Attributes:
      model: the `DualEncoderModel`.
      tokenizer: the model's tokenizer.
      settings: maximum lengths and prompts of the two towers.
      fingerprint: identifies the weights and the tokenizer; vectors of two fingerprints must not be compared.
        It is computed unless given.
      spec: the name by which the model was loaded; None for a model that was never saved.
      step: the step of the loaded checkpoint, if the model is a training run; else None.
      weights: how the weights are quantised ("int8", "nf4"); None: not at all.
      dimension: D, the number of components of a vector.
      similarity_fn_name: "cosine" (vectors have length 1) or "dot"; `similarity` compares vectors by it.
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
        weights: Scheme | None = None,
        batch_tokens: int | None = None,
        partitioner: Partitioner | None = None,
    ):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.spec, self.step, self.weights = spec, step, weights
        self.fingerprint: str = fingerprint or model_dir.fingerprint_of(model, tokenizer, settings)
        self.similarity_fn_name: str = model.config.similarity
        # Each process encodes its own batches on its own devices.
        partitioner = partitioner or MeshConfig().build(local_devices())
        self.runner = Runner(model, partitioner, batch_tokens=batch_tokens)
        self.dimension: int = model.config.dimension

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: Dtype = "float32",
        weights: Scheme | None = None,
        batch_tokens: int | None = None,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
        prompt_name: str | None = None,
    ) -> "DualEncoder":
        """Loads a model.

        Args:
          spec: a jaxir model or run directory; `st:` or `hf:` and a local directory or hub name; or only a
            hub name, such as "all-MiniLM-L6-v2" or "BAAI/bge-small-en-v1.5".
          dtype: type of the matrix products; vectors are always float32. With bfloat16 the weights take half
            of the memory. "auto": bfloat16 on a CPU that multiplies it natively, else float32.
          weights: keep the backbone's kernels and table of tokens in "int8", or the kernels in 4 bits
            ("nf4"); `jaxir.models.quantized` describes both. Vectors differ from those of None.
          batch_tokens: maximum number of tokens per batch on one device; None uses the platform's default.
          query_max_length: maximum number of tokens per query; None: the model's setting.
          passage_max_length: maximum number of tokens per passage; None: the model's setting.
          prompt_name: the prompt of the model's sentence-transformers folder that goes before each text,
            whatever its tower; None: each tower's own.

        Raises:
          UserError: the model does not exist, cannot be read, has fewer positions than a maximum length, or
            no prompt of this name; or qwix, which quantises, is not installed.
        """
        check_devices()
        loaded = model_dir.load(spec, dtype=settled_dtype(dtype), weights=weights, halved=True)
        lengths = {"query_max_length": query_max_length, "passage_max_length": passage_max_length}
        settings = dataclasses.replace(
            loaded.settings, **{name: length for name, length in lengths.items() if length is not None}
        )
        stored.check_lengths(settings, loaded.model.config, spec)
        model = loaded.model
        if prompt_name is not None:
            prompt = settings.prompt_named(prompt_name, spec)
            settings = dataclasses.replace(settings, query_prompt=prompt, passage_prompt=prompt)
            count = 0 if settings.pools_prompts else loaded.tokenizer.prompt_length(prompt)
            counts = {"query_prompt_tokens": count, "passage_prompt_tokens": count}
            model = model.with_config(dataclasses.replace(model.config, **counts))
        return cls(
            model,
            loaded.tokenizer,
            settings,
            loaded.fingerprint,
            spec=model_dir.absolute(spec),
            step=loaded.step,
            weights=weights,
            batch_tokens=batch_tokens,
        )

    def save(self, directory: str | Path) -> None:
        """Writes a model directory, which `load` and every command take; it appears only when complete.

        Raises:
          UserError: `directory` exists and is not empty, or the encoder was loaded in bfloat16 or quantised.
        """
        check_not_rounded(self.model)
        model_dir.save(directory, self.model, self.tokenizer, self.settings)

    def push_to_hub(self, repo: str, *, private: bool = False) -> str:
        """Uploads the model to OWNER/NAME on the Hugging Face hub as a folder of sentence-transformers.

        Returns the address of its page, which is the model card that `jaxir.export` writes. Raises a
        UserError if the hub refuses the upload, or the model cannot be written (see `save`).
        """
        from jaxir.interop import formats

        with temporary_directory() as place:
            source = self.spec
            if source is None or self.weights is not None:
                source = f"{place}/model"
                self.save(source)
            formats.convert(source, f"{place}/folder", "st", repo=repo)
            return push.push(f"{place}/folder", repo, private=private)

    def __repr__(self) -> str:
        name = f"{self.spec!r}: " if self.spec else ""
        settings = self.settings
        return (
            f"DualEncoder({name}{self.model.config.summary}, {size_of(self.model)}, queries of"
            f" {settings.query_max_length} tokens, passages of {settings.passage_max_length})"
        )

    def encode_queries(
        self,
        texts: str | Iterable[str],
        *,
        batch_size: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        precision: Precision = "float32",
        show_progress: bool = True,
    ) -> np.ndarray:
        """Returns vectors [N, D] of queries, or one [D] of one string; `encode` describes the arguments."""
        how = {"batch_size": batch_size, "prompt": prompt, "prompt_name": prompt_name}
        how |= {"truncate_dim": truncate_dim, "normalize": normalize, "precision": precision}
        return self.encode(texts, tower="query", show_progress=show_progress, **how)

    def encode_passages(
        self,
        texts: str | Iterable[str],
        *,
        batch_size: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        precision: Precision = "float32",
        show_progress: bool = True,
    ) -> np.ndarray:
        """Returns vectors [N, D] of passages, or one [D] of one string; `encode` describes the arguments."""
        how = {"batch_size": batch_size, "prompt": prompt, "prompt_name": prompt_name}
        how |= {"truncate_dim": truncate_dim, "normalize": normalize, "precision": precision}
        return self.encode(texts, tower="passage", show_progress=show_progress, **how)

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        tower: Tower | None = None,
        batch_size: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        precision: Precision = "float32",
        show_progress: bool = True,
        report: EncodingReport | None = None,
    ) -> np.ndarray:
        """Encodes texts by one tower.

        Args:
          texts: N texts, which may be empty, or one string; each is truncated at the tower's maximum length.
          tower: "query" or "passage". None: the passage tower without its prompt, like `encode` of
              sentence-transformers; the folder's default prompt is used, if it has one.
          batch_size: maximum number of texts per batch on one device. None: only the number of tokens of a
            batch is limited (`batch_tokens`), which is faster.
          prompt: text put before each text, instead of the tower's prompt. `prompt_name` is then ignored.
          prompt_name: name of a prompt of the model's sentence-transformers folder, "query" or "document".
          truncate_dim: d, the number of components to keep of each vector, the first ones.
          normalize: whether to scale vectors to length 1, after they are truncated. Vectors of cosine models
            already have length 1, unless they are truncated.
          precision: the form of the vectors (see `jaxir.quantize_embeddings`). As in sentence-transformers,
            "int8" and "uint8" take the range of each component from the texts of this call.
          show_progress: whether to show a progress bar (on a terminal only).
          report: the counts of this call are added to it.

        Returns:
          float32 vectors [N, D] in the order of the texts, or [D] of one string. D is d with `truncate_dim`,
          and D/8 with "binary" and "ubinary". The type is int8 or uint8 with another `precision`.

        Raises:
          TypeError: `texts` holds something that is not a string.
          ValueError: `precision` is unknown, or int8 or uint8 for one text.
          UserError: the model gives vectors that are not finite or too long (see `checked`), has no prompt of
            this name, or has fewer dimensions than `truncate_dim`.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        if not all(isinstance(text, str) for text in given):
            raise TypeError("texts must be a string or a list of strings")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        check_form(self.dimension, truncate_dim, precision)
        prompt = self._prompt(tower, prompt, prompt_name)
        vectors = self._vectors(given, tower or "passage", prompt, batch_size, show_progress, report)
        vectors = formed(vectors, truncate_dim, normalize, precision)
        return vectors[0] if isinstance(texts, str) else vectors

    def similarity(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns float32 [A, B]: vectors [A, D] compared with vectors [B, D] by `similarity_fn_name`."""
        return similarities(a, b, cosine=self.similarity_fn_name == "cosine")

    def similarity_pairwise(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns float32 [A]: each of `a` [A, D] compared with its vector of `b` [A, D]."""
        return similarities(a, b, cosine=self.similarity_fn_name == "cosine", pairwise=True)

    def _prompt(self, tower: Tower | None, prompt: str | None, name: str | None) -> str | None:
        """Returns the prompt that a call of `encode` uses; None stands for the tower's own."""
        settings = self.settings
        if prompt is None and name is not None:
            prompt = settings.prompt_named(name, self.spec or "the model")
        if prompt is None and tower is None:
            prompt = settings.named_prompts.get(settings.default_prompt_name, "")
        return prompt

    def _vectors(
        self,
        texts: list[str],
        tower: Tower,
        prompt: str | None,
        batch_size: int | None,
        show_progress: bool,
        report: EncodingReport | None,
    ) -> np.ndarray:
        """Returns float32 vectors [N, D] of texts, each after the prompt."""
        starts = range(0, len(texts), WINDOW)
        windows = (self.tokens(texts[start : start + WINDOW], tower, prompt=prompt) for start in starts)
        vectors = np.empty([len(texts), self.dimension], np.float32)
        what = f"encoding {'queries' if tower == 'query' else 'passages'}"
        with progress(total=len(texts), what=what, unit="texts", hidden=not show_progress) as bar:
            start = 0
            parts = self.encode_tokens(
                windows,
                tower=tower,
                prompt=prompt,
                num_windows=max(1, len(starts)),
                max_rows=batch_size,
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
        prompt: str | None = None,
        num_windows: int = 1,
        max_rows: int | None = None,
        report: EncodingReport | None = None,
        on_batch: Callable[[int], Any] | None = None,
    ) -> Iterator[np.ndarray]:
        """Encodes lists of token ids, each sorted and batched separately; yields float32 [n, D] for each.

        The vectors of a list depend only on the list, the model and the machine, so a stream can resume at
        any list. A thread draws from `windows`, one list ahead.

        Args:
          windows: lists of token ids, from `tokens`.
          tower: "query" or "passage".
          prompt: the prompt that `tokens` put before the texts; None: the tower's own.
          num_windows: the approximate number of lists (see `Runner.run`).
          max_rows: maximum number of texts per batch on one device; None: only tokens are limited.
          report: the counts of this call are added to it.
          on_batch: called with the number of texts of each finished batch.
        """
        report = EncodingReport() if report is None else report
        embed = EMBED[tower]
        if prompt is not None and not self.settings.pools_prompts:
            embed = embed_after(self.tokenizer.prompt_length(prompt), tower)
        for tokens in one_ahead(iter(windows)):
            started = time.perf_counter()
            vectors = self.runner.run(
                embed,
                tokens,
                row_shape=(self.dimension,),
                num_windows=num_windows,
                max_rows=max_rows,
                report=report,
                on_batch=on_batch,
            )
            self.checked(vectors)
            report.seconds += time.perf_counter() - started
            yield vectors

    def tokens(
        self,
        texts: Sequence[str],
        tower: Tower,
        truncation: Truncation | None = None,
        *,
        prompt: str | None = None,
    ) -> list[np.ndarray]:
        """Returns the token ids of texts with a prompt, truncated at the tower's maximum length.

        The prompt is the tower's own unless given. If given, `truncation` counts the texts and the truncated
        texts.
        """
        own, max_length = self.text_settings(tower)
        prompt = own if prompt is None else prompt
        return self.tokenizer.encode_batch(
            [prompt + text for text in texts], max_length=max_length, truncation=truncation
        )

    def text_settings(self, tower: Tower) -> tuple[str, int]:
        """Returns (prompt, maximum length in tokens) of a tower."""
        return self.settings.of_tower(tower)

    @property
    def made_by(self) -> MadeBy:
        return MadeBy(self.spec, self.step, self.weights)

    def checked(self, vectors: np.ndarray) -> np.ndarray:
        """Returns `vectors`. Raises UnusableVectorError if one is not finite or longer than `LONGEST`."""
        if (found := first_unusable(vectors)) is not None:
            raise UnusableVectorError(f"{self.made_by} gives a vector that", *found)
        return vectors
