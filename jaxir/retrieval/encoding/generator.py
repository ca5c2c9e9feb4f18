"""`Generator`: texts in, texts that a model writes for them out."""

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

# Tokens of the sources of a batch: their outputs are computed a token at a time, so it takes many to fill a
# machine.
BATCH_TOKENS = {"cpu": 4096}


@functools.lru_cache(maxsize=16)
def _writes(how: Decoding) -> Callable[[Seq2SeqModel, jax.Array], jax.Array]:
    """Returns the function that generates so: the same for the same settings, as programs are kept by it."""

    def outputs(model: Seq2SeqModel, ids: jax.Array) -> jax.Array:
        return model.generate(ids, how)

    return outputs


class Generator:
    """Writes texts for texts: queries for documents, contexts for questions.

    Texts are sorted by tokens and batched to a token budget in few shapes (see `encoding.batching`), and
    batches are split over all devices of this process.

    Args:
      loaded: the model, from `jaxir.interop.model_dir.load`.
      spec: what it is called.
      batch_tokens: tokens of the texts of a batch on one device; None suits the platform.
      devices: that share each batch; None: all of this process.

    Attributes:
      fingerprint: identifies weights and tokenizer.
      spec: what was loaded.
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
          spec: a jaxir model directory or run; `hf:` and a local directory or hub name.
          dtype: type of matrix products; None leaves it.
          batch_tokens: tokens of the texts of a batch on one device; None suits the platform.
          devices: that share each batch; None: all of this process.

        Raises:
          UserError: there is no such model, it is damaged, or it is no generator.
        """
        loaded = model_dir.load(spec, kind="seq2seq", dtype=dtype)
        return cls(loaded, spec=spec, batch_tokens=batch_tokens, devices=devices)

    def save(self, directory: str | Path) -> None:
        """Writes a model directory, which `load` and every command take; it appears only when whole.

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
        """Writes outputs for texts.

        Args:
          texts: N texts; they are cut where the model's settings say.
          how: see `Decoding`; None: greedily.
          num_windows: how many such calls there will be about (see `Runner.run`).
          on_batch: called with the number of texts of each batch when it is done.

        Returns:
          The outputs of each text, the best first, those that say the same and those that say nothing left
          out.

        Raises:
          UserError: the model gives logits that are not finite.
        """
        how = how or Decoding()
        settings, to = self.settings, self.settings.passage_max_length
        prompted = [settings.passage_prompt + text for text in texts]
        tokens = self.runner.run(
            _writes(how),
            self.tokenizer.encode_batch(prompted, max_length=to),
            of=(how.num_outputs, how.max_new_tokens),
            dtype=np.int32,
            num_windows=num_windows,
            on_batch=on_batch,
        )
        return self.written(tokens)

    def written(self, tokens: np.ndarray) -> list[list[str]]:
        """Returns the outputs of texts, of tokens [N, K, T]; raises a UserError as `check_tokens`."""
        check_tokens(tokens, f"model {self.spec}")
        return [self._texts(outputs) for outputs in tokens]

    def _texts(self, outputs: np.ndarray) -> list[str]:
        outputs = np.where(outputs == self.model.config.eos_id, 0, outputs)
        written = (text_of(ids, self.tokenizer) for ids in outputs)
        return [text for text in dict.fromkeys(written) if has_text(text)]


def check_tokens(tokens: np.ndarray, model: str) -> None:
    """Checks tokens that a model wrote.

    Raises:
      UserError: there are none, for its logits were not finite.
    """
    if (tokens == FAULT).any():
        raise UserError(f"{model} gives logits that are not finite")


def text_of(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Returns the text of tokens [T]; padding and special tokens are no part of it."""
    return tokenizer.decode(ids[ids != 0]).strip()
