"""`Generator`: a sequence-to-sequence model that generates texts from texts."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.platforms import local_devices
from jaxir.data.formats.lines import has_text
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.interop.model_dir import LoadedModel
from jaxir.models.decoding import FAULT, Decoding
from jaxir.models.seq2seq import Seq2SeqModel
from jaxir.retrieval.encoding.batch_runner import Runner
from jaxir.runtime.partitioning import MeshConfig

# Input tokens per batch. Outputs are computed one token at a time, so only large batches keep a CPU busy.
BATCH_TOKENS = {"cpu": 4096}


@functools.lru_cache(maxsize=16)  # a function object has its own programs, so equal settings must share it
def _generate_function(how: Decoding) -> Callable[[Seq2SeqModel, jax.Array], jax.Array]:
    def outputs(model: Seq2SeqModel, ids: jax.Array) -> jax.Array:
        return model.generate(ids, how)

    return outputs


class Generator:
    """Generates texts from texts, such as queries from documents or contexts from questions.

    Texts are sorted by their number of tokens and batched to a token budget. Batches are split over all
    devices of this process.

    Attributes:
      fingerprint: identifies weights and tokenizer.
      spec: the name by which the model was loaded.
      training: how training ended (a `jaxir.training.loop.TrainResult`), for the result of `fit`; else None.
    """

    training: Any = None

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        spec: str,
        batch_tokens: int | None = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.model, self.fingerprint, self.spec = loaded.model, loaded.fingerprint, spec
        self.tokenizer, self.settings = loaded.tokenizer, loaded.settings
        partitioner = MeshConfig().build(devices or local_devices())
        batch_tokens = batch_tokens or BATCH_TOKENS.get(jax.default_backend())
        self.runner = Runner(loaded.model, partitioner, batch_tokens=batch_tokens)

    def __repr__(self) -> str:
        name = f"{self.spec!r}: " if self.spec else ""
        return f"Generator({name}{self.model!r}, of texts of {self.settings.passage_max_length} tokens)"

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: Literal["float32", "bfloat16"] | None = None,
        batch_tokens: int | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> "Generator":
        """Loads a generator.

        Args:
          spec: a jaxir model directory or run, or `hf:` followed by a local directory or hub name.
          dtype: type of matrix products; None keeps the model's.
          batch_tokens: maximum input tokens per batch on one device; None uses the platform's default.
          devices: devices that share each batch; None: all devices of this process.

        Raises:
          UserError: the model does not exist, is damaged, or is not a generator.
        """
        loaded = model_dir.load(spec, kind="seq2seq", dtype=dtype)
        return cls(loaded, spec=spec, batch_tokens=batch_tokens, devices=devices)

    def save(self, directory: str | Path) -> None:
        """Writes a model directory, which `load` and every command take; it appears only when complete.

        Raises:
          UserError: `directory` exists and is not empty.
        """
        model_dir.save(directory, self.model, self.tokenizer, self.settings)

    def generate(
        self,
        texts: Sequence[str],
        how: Decoding | None = None,
        *,
        num_windows: int = 1,
        on_batch: Callable[[int], Any] | None = None,
    ) -> list[list[str]]:
        """Generates outputs for texts.

        Args:
          texts: N texts; each is truncated at the model's maximum length.
          how: how to decode (see `Decoding`); None: greedily.
          num_windows: the approximate number of calls that share compiled shapes (see `Runner.run`).
          on_batch: called with the number of texts of each finished batch.

        Returns:
          The outputs of each text, the best first, without empty and repeated outputs.

        Raises:
          UserError: the model gives logits that are not finite.
        """
        how = how or Decoding()
        prompted = [self.settings.passage_prompt + text for text in texts]
        tokens = self.runner.run(
            _generate_function(how),
            self.tokenizer.encode_batch(prompted, max_length=self.settings.passage_max_length),
            row_shape=(how.num_outputs, how.max_new_tokens),
            dtype=np.int32,
            num_windows=num_windows,
            on_batch=on_batch,
        )
        return self.written(tokens)

    def written(self, tokens: np.ndarray) -> list[list[str]]:
        """Decodes output tokens [N, K, T] to the outputs of N texts; raises UserError like `check_tokens`."""
        check_tokens(tokens, f"model {self.spec}")
        return [self._texts(outputs) for outputs in tokens]

    def _texts(self, outputs: np.ndarray) -> list[str]:
        outputs = np.where(outputs == self.model.config.eos_id, 0, outputs)
        written = (text_of(ids, self.tokenizer) for ids in outputs)
        return [text for text in dict.fromkeys(written) if has_text(text)]


def check_tokens(tokens: np.ndarray, model: str) -> None:
    """Raises a UserError if decoding met logits that are not finite."""
    if (tokens == FAULT).any():
        raise UserError(
            f"{model} returns logits that are not finite: use a checkpoint from before its training diverged"
        )


def text_of(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Returns the text of token ids [T], without padding and special tokens."""
    return tokenizer.decode(ids[ids != 0]).strip()
