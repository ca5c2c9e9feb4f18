"""`CrossEncoder`: scores the relevance of (query, passage) pairs of texts."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Float

from jaxir.core.errors import UserError
from jaxir.core.features import Reads
from jaxir.core.platforms import local_devices
from jaxir.core.progress import progress
from jaxir.data.text.pair_tokenizer import PairTokenizer, TokenPair
from jaxir.interop import model_dir
from jaxir.interop.model_dir import LoadedModel
from jaxir.models.cross_encoder import CrossEncoderModel
from jaxir.models.quantized import Scheme
from jaxir.retrieval.encoding.batch_runner import WINDOW, Runner
from jaxir.runtime.partitioning import MeshConfig

_IN_WORDS: dict[Reads, str] = {
    "pair": "pairs of a query and a passage",
    "expanded_query": "expanded queries by themselves",
    "expanded_query_and_passage": "expanded queries with the first passage that each finds",
}


def score_pairs(model: CrossEncoderModel, ids: jax.Array, types: jax.Array) -> jax.Array:
    return model.score(ids, types)


class CrossEncoder:
    """Scores pairs of a query and a passage, in float32 (with the platform's default matrix precision).

    Pairs are sorted by their number of tokens and batched to a token budget. Batches are split over all
    devices of this process. The same pairs give the same scores.

    Attributes:
      fingerprint: identifies weights and tokenizer.
      spec: the name by which the model was loaded.
      max_length: maximum number of tokens per pair.
      training: how training ended (a `jaxir.training.loop.TrainResult`), for the result of `fit`; else None.
    """

    training: Any = None
    kinds: ClassVar[tuple[Reads, ...]] = ("pair",)
    others_use: ClassVar[str] = "use it with python -m jaxir.expand rerank"

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        spec: str,
        batch_tokens: int | None = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        if loaded.settings.reads not in self.kinds:
            reads = _IN_WORDS[loaded.settings.reads]
            raise UserError(f"{spec} was trained to read {reads}: {self.others_use}")
        self.model, self.fingerprint, self.spec = loaded.model, loaded.fingerprint, spec
        self.texts, self.tokenizer = loaded.tokenizer, PairTokenizer(loaded.tokenizer)
        self.settings = loaded.settings
        self.max_length = loaded.settings.pair_max_length
        partitioner = MeshConfig().build(devices or local_devices())
        self.runner = Runner(loaded.model, partitioner, batch_tokens=batch_tokens)

    def __repr__(self) -> str:
        return f"CrossEncoder({self.spec!r}, pairs of {self.max_length} tokens)"

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        weights: Scheme | None = None,
        batch_tokens: int | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> "CrossEncoder":
        """Loads a cross-encoder. It computes in float32, whatever type it was trained in.

        Args:
          spec: a jaxir model directory or run; `hf:` or `st:` and a local directory or hub name.
          weights: keep the backbone's weights in "int8" or "nf4", as `DualEncoder.load` does.
          batch_tokens: maximum number of tokens per batch on one device; None uses the platform's default.
          devices: devices that share each batch; None: all devices of this process.

        Raises:
          UserError: the model does not exist, is damaged, or is not a cross-encoder.
        """
        loaded = model_dir.load(spec, kind="cross_encoder", dtype="float32", weights=weights)
        return cls(loaded, spec=spec, batch_tokens=batch_tokens, devices=devices)

    def score(self, pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, " N"]:
        """Scores pairs, with a progress bar.

        Args:
          pairs: N (query, passage) pairs; if a pair is too long, its longer text is truncated.

        Returns:
          float32 logits [N], in the order of the pairs; a greater logit means more relevant.

        Raises:
          UserError: the model gives scores that are not finite.
        """
        scores = np.empty([len(pairs)], np.float32)
        with progress(total=len(pairs), what="judging", unit="pairs") as bar:
            for start in range(0, len(pairs), WINDOW):
                tokens = self.tokens(pairs[start : start + WINDOW])
                ids, types = [pair.ids for pair in tokens], [pair.types for pair in tokens]
                found = self.runner.run(score_pairs, ids, types, on_batch=bar.update)
                scores[start : start + len(found)] = found
        return self.checked(scores)

    def checked(self, scores: np.ndarray) -> np.ndarray:
        """Returns scores; raises a UserError if one is not finite."""
        if not np.isfinite(scores).all():
            raise UserError(
                f"model {self.spec} returns scores that are not finite: use a checkpoint from before its"
                " training diverged"
            )
        return scores

    def tokens(self, pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
        """Returns the tokens of pairs, with the model's prompts, truncated at its maximum length."""
        settings = self.settings
        texts = [(settings.query_prompt + q, settings.passage_prompt + passage) for q, passage in pairs]
        return self.tokenizer.encode(texts, max_length=self.max_length)

    def relevance(self, pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, " N"]:
        """Returns the probabilities [N] of N pairs: the sigmoid of their logits."""
        import scipy.special

        return scipy.special.expit(self.score(pairs))
