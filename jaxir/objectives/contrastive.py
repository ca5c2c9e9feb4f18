"""Contrastive training of a dual encoder: embed the batch, then one loss over all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxir.core.features import Features, TextFormat
from jaxir.core.values import Count, checked
from jaxir.losses.samtone import samtone
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.objective import Batch, LossObjective, Metrics
from jaxir.objectives.pair_batch import pair_features
from jaxir.runtime.partitioning import constrain

KEYS = ("query_key", "passage_key", "negative_key")


class Embeddings(NamedTuple):
    """The batch in the embedding space.

    Attributes:
      query: [B, D], float32.
      passage: [B, D], float32.
      negatives: [B, N, D], float32, or None where the batch has no hard negatives.
    """

    query: jax.Array
    passage: jax.Array
    negatives: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class Contrastive(LossObjective):
    """In-batch contrastive training.

    Calling it gives (loss, metrics) in two steps, `embed` and `loss_of`; whatever scales contrastive training
    (gradient caching, other devices' negatives) works between them.

    Attributes:
      loss: a loss of `jaxir.losses` with its settings bound, called as
        loss(query, passage, negatives, query_key=, passage_key=, negative_key=) -> (scalar, metrics).
      chunks: into how many parts the batch is cut for gradient caching (see
        `jaxir.objectives.gradient_cache`): the step needs the memory of one part's activations and up to 4/3
        of the time. 1 for none; "auto" has the training loop take the fewest that fit into the devices'
        memory.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = samtone
    chunks: Count | Literal["auto"] = 1
    loss_inputs = KEYS
    reads_with = "encode_together"

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: pairs, with their hard negatives where the format has some."""
        return pair_features(form)

    def embed(self, model: Any, batch: Batch, key: jax.Array | None = None) -> Embeddings:
        """Encodes query_ids [B, Lq], passage_ids [B, Lp] and, where given, negative_ids [B, N, Lp].

        Args:
          model: the dual encoder.
          batch: int32 token ids by feature name.
          key: randomness of dropout, different for each of the calls of a tower; None means no dropout.

        Raises:
          UserError: `chunks` does not divide B.
        """
        ids = {name: x for name, x in batch.items() if name.endswith("_ids")}
        return embed_in_chunks(
            lambda part, key: self._embed_at_once(model, part, key), ids, key, chunks=self.chunks
        )

    def _embed_at_once(self, model: Any, batch: Batch, key: jax.Array | None) -> Embeddings:
        keys: Any = (None, None, None) if key is None else jax.random.split(key, 3)
        texts = [(batch["query_ids"], "query", keys[0]), (batch["passage_ids"], "passage", keys[1])]
        negatives = batch.get("negative_ids")
        if negatives is not None:
            texts.append((negatives.reshape(-1, negatives.shape[-1]), "passage", keys[2]))
        query, passage, *rest = model.encode_together(texts)
        if negatives is not None:
            negatives = constrain(rest[0].reshape(*negatives.shape[:2], -1), ("batch", None, "affinity"))
        return Embeddings(
            query=constrain(query, ("batch", "affinity")),
            passage=constrain(passage, ("batch", "affinity")),
            negatives=negatives,
        )

    def loss_of(self, embeddings: Embeddings, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Applies the loss to the embeddings of the whole batch, with the keys the batch has."""
        keys = {name: batch.get(name) for name in KEYS}
        return self.loss(embeddings.query, embeddings.passage, embeddings.negatives, **keys)

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: None = None,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        return self.loss_of(self.embed(model, batch, key), batch)
