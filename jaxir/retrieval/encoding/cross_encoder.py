"""`CrossEncoder`: (query, passage) texts in, relevance scores out."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import scipy.special
from flax import nnx
from jaxtyping import Float

from jaxir.data.pair_tokenizer import PairTokenizer, TokenPair
from jaxir.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.model_dir import LoadedModel
from jaxir.models.layers import param_shardings
from jaxir.models.products import as_run_on
from jaxir.partitioning import MeshConfig, Partitioner
from jaxir.progress import progress
from jaxir.retrieval.encoding.batching import Batch, fill, plan_batches
from jaxir.retrieval.encoding.dual_encoder import (
    ACCELERATOR_BATCH_TOKENS,
    ACCELERATOR_SHAPE_COST,
    BATCH_TOKENS,
    SHAPE_COST,
    WINDOW,
)


class CrossEncoder:
    """Scores pairs of a query and a passage, in float32 (products as precise as the platform's default).

    Pairs are sorted by tokens and batched to a token budget in few shapes (see `encoding.batching`), and
    batches are split over all devices of this process. The same pairs give the same scores.

    Args:
      loaded: the model, from `jaxir.interop.model_dir.load_cross_encoder`.
      spec: what it is called.
      batch_tokens: tokens of a batch on one device; None suits the platform.
      devices: that share each batch; None: all of this process.

    Attributes:
      fingerprint: identifies weights and tokenizer.
      spec: what was loaded.
      max_length: tokens of a pair, at most.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        spec: str,
        batch_tokens: int | None = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.fingerprint, self.spec = loaded.fingerprint, spec
        self.tokenizer, self.settings = PairTokenizer(loaded.tokenizer), loaded.settings
        self.max_length = loaded.settings.pair_max_length
        self.partitioner = MeshConfig().build(devices or jax.local_devices())
        platform = jax.default_backend()
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(platform, ACCELERATOR_BATCH_TOKENS)
        self._shape_cost = int(SHAPE_COST.get(platform, ACCELERATOR_SHAPE_COST) * self.batch_tokens)
        graph, state = nnx.split(loaded.model)
        leaves, tree = jax.tree.flatten(state)
        shardings = jax.tree.leaves(param_shardings(state, self.partitioner))
        self._parameters = jax.device_put(leaves, shardings)
        self._program = _program(graph, tree, shardings, self.partitioner)

    def __repr__(self) -> str:
        return f"CrossEncoder({self.spec!r}, pairs of {self.max_length} tokens)"

    @classmethod
    def load(
        cls, spec: str, *, batch_tokens: int | None = None, devices: Sequence[jax.Device] | None = None
    ) -> "CrossEncoder":
        """Loads a cross-encoder.

        Args:
          spec: a jaxir model directory or run; `hf:` or `st:` and a local directory or hub name.
          batch_tokens: tokens of a batch on one device; None suits the platform.
          devices: that share each batch; None: all of this process.

        Raises:
          UserError: there is no such model, it is damaged, or it is no cross-encoder.
        """
        loaded = model_dir.load_cross_encoder(spec)
        return cls(loaded, spec=spec, batch_tokens=batch_tokens, devices=devices)

    def score(self, pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, " N"]:
        """Scores pairs, under a progress bar.

        Args:
          pairs: N (query, passage) pairs; where one is too long, its longer text is cut.

        Returns:
          float32 logits [N], in the order of the pairs: the greater, the more relevant.

        Raises:
          UserError: the model gives scores that are not finite.
        """
        scores = np.empty([len(pairs)], np.float32)
        with progress(total=len(pairs), what="judging", unit="pairs") as bar:
            for start in range(0, len(pairs), WINDOW):
                part = pairs[start : start + WINDOW]
                scores[start : start + len(part)] = self._score_window(part, bar)
        return self.checked(scores)

    def checked(self, scores: np.ndarray) -> np.ndarray:
        """Returns scores; raises a UserError where one is not finite."""
        if not np.isfinite(scores).all():
            raise UserError(f"model {self.spec} gives scores that are not finite")
        return scores

    def tokens(self, pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
        """Returns the tokens of pairs, with the prompts and cut as the model wants them."""
        before = self.settings
        texts = [(before.query_prompt + query, before.passage_prompt + passage) for query, passage in pairs]
        return self.tokenizer.encode(texts, max_length=self.max_length)

    def run(self, ids: np.ndarray, types: np.ndarray) -> jax.Array:
        """Returns the logits [B] of a batch of pairs [B, L], B a multiple of the devices that share it."""
        return self._program(self._parameters, ids, types)

    def relevance(self, pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, " N"]:
        """Returns the probabilities [N] of being relevant that the logits of N pairs stand for."""
        return scipy.special.expit(self.score(pairs))

    def _score_window(self, pairs: Sequence[tuple[str, str]], bar: Any) -> np.ndarray:
        tokens = self.tokens(pairs)
        ids, types = [pair.ids for pair in tokens], [pair.types for pair in tokens]
        scores = np.empty([len(pairs)], np.float32)
        plan = plan_batches(
            [len(row) for row in ids],
            batch_tokens=self.batch_tokens,
            shape_cost=self._shape_cost,
            row_multiple=self.partitioner.mesh.size,
        )

        def fetch(batch: Batch, output: jax.Array) -> None:
            scores[batch.texts] = np.asarray(output)[: len(batch.texts)]
            bar.update(len(batch.texts))

        # JAX computes one batch while the next is filled.
        waiting: list[tuple[Batch, jax.Array]] = []
        for batch in plan:
            output = self.run(fill(ids, batch), fill(types, batch))
            waiting.append((batch, output))
            if len(waiting) > 1:
                fetch(*waiting.pop(0))
        for rest in waiting:
            fetch(*rest)
        return scores


def _program(graph: Any, tree: Any, shardings: list[Any], partitioner: Partitioner) -> Any:
    """Returns (parameters, ids [B, L], token types [B, L]) -> logits [B], which compiles once for a shape."""

    def score(parameters: list[jax.Array], ids: jax.Array, types: jax.Array) -> jax.Array:
        with partitioner(), as_run_on(partitioner.mesh):
            return nnx.merge(graph, jax.tree.unflatten(tree, parameters)).score(ids, types)

    batch, row = partitioner.sharding(("batch", "length")), partitioner.sharding(("batch",))
    return jax.jit(score, in_shardings=(shardings, batch, batch), out_shardings=row)
