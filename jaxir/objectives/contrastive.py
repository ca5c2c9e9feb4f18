"""Contrastive training of a dual encoder: one loss over the embeddings of the global batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxir.core.features import Features, TextFormat
from jaxir.core.values import Count, checked
from jaxir.losses.samtone import samtone
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.objective import Batch, LossObjective, Metrics, RandomKey
from jaxir.objectives.pair_batch import pair_features
from jaxir.runtime.partitioning import constrain

KEYS = ("query_key", "passage_key", "negative_key")


class Embeddings(NamedTuple):
    """The embeddings of a batch of B pairs, each with N hard negatives.

    Attributes:
      query: [B, D], float32.
      passage: [B, D], float32.
      negatives: [B, N, D], float32; None if the batch has no hard negatives.
    """

    query: jax.Array
    passage: jax.Array
    negatives: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class Contrastive(LossObjective):
    """In-batch contrastive training of a dual encoder.

    A call returns (loss, metrics), computed in two steps: `embed` and `loss_of`. A subclass for models with
    another head sets `reads_with` to the model's method that `embed_by` calls.

    Attributes:
      loss: a loss of `jaxir.losses` with its settings bound, called as
        loss(query, passage, negatives, query_key=, passage_key=, negative_key=) -> (scalar, metrics).
      chunks: the number of parts into which the batch is cut for gradient caching (see
        `jaxir.objectives.gradient_cache`). A step then keeps the activations of only one part in memory, and
        takes up to 4/3 of the time. 1: no caching; "auto": the training loop uses the smallest number of
        parts that fits into the devices' memory.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = samtone
    chunks: Count | Literal["auto"] = 1
    loss_inputs = KEYS
    reads_with = "encode_together"

    def features(self, form: TextFormat) -> Features:
        """Returns the features of a batch: pairs, with hard negatives if the format has any."""
        return pair_features(form)

    def embed(self, model: Any, batch: Batch, key: RandomKey = None) -> Embeddings:
        """Encodes query_ids [B, Lq], passage_ids [B, Lp] and, if given, negative_ids [B, N, Lp].

        Args:
          model: the dual encoder.
          batch: int32 arrays by feature name. Pooling leaves out query_prompt_tokens [B] and
            passage_prompt_tokens [B], if given, else the model's own numbers of tokens.
          key: for dropout; queries, passages and negatives have different masks. None: no dropout.

        Raises:
          UserError: `chunks` does not divide B.
        """
        ids = {name: x for name, x in batch.items() if name.endswith(("_ids", "_prompt_tokens"))}
        return embed_in_chunks(
            lambda part, key: self._embed_at_once(model, part, key), ids, key, chunks=self.chunks
        )

    def _embed_at_once(self, model: Any, batch: Batch, key: RandomKey) -> Embeddings:
        if self.reads_with != Contrastive.reads_with:
            return embed_by(getattr(model, self.reads_with), batch, key)
        keys: Any = (None, None, None) if key is None else jax.random.split(key, 3)
        texts = [(batch["query_ids"], "query", keys[0]), (batch["passage_ids"], "passage", keys[1])]
        left_out = [batch.get("query_prompt_tokens"), batch.get("passage_prompt_tokens")]
        negatives = batch.get("negative_ids")
        if negatives is not None:
            texts.append((negatives.reshape(-1, negatives.shape[-1]), "passage", keys[2]))
            left_out.append(None if left_out[1] is None else jnp.repeat(left_out[1], negatives.shape[1]))
        how = {} if left_out[0] is None else {"left_out": left_out}
        query, passage, *rest = model.encode_together(texts, **how)
        if negatives is not None:
            negatives = constrain(rest[0].reshape(*negatives.shape[:2], -1), ("batch", None, "affinity"))
        query, passage = (constrain(side, ("batch", "affinity")) for side in (query, passage))
        return Embeddings(query, passage, negatives)

    def loss_of(self, embeddings: Embeddings, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Applies the loss to all embeddings of the batch, with the keys that identify equal texts."""
        return self.loss(*embeddings, **{name: batch.get(name) for name in KEYS})

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        return self.loss_of(self.embed(model, batch, key), batch)


def embed_by(
    read: Callable[[list[tuple[jax.Array, str, RandomKey]]], list[Any]], batch: Batch, key: RandomKey
) -> Embeddings:
    """Embeds the texts of a batch by a model's method, which takes all texts at once.

    Args:
      read: the method, which maps (token ids [B, L], tower, dropout key) of several batches to a result for
        each: arrays [B, D] or texts of `jaxir.losses`, such as `TokenVectors`.
      batch: query_ids [B, Lq], passage_ids [B, Lp] and, if given, negative_ids [B, N, Lp].
      key: for dropout; None: no dropout.
    """
    keys: Any = (None, None, None) if key is None else jax.random.split(key, 3)
    texts = [(batch["query_ids"], "query", keys[0]), (batch["passage_ids"], "passage", keys[1])]
    negatives = batch.get("negative_ids")
    if negatives is None:
        return Embeddings(*read(texts))
    flat = constrain(negatives.reshape(-1, negatives.shape[-1]), ("batch", None))
    query, passage, found = read([*texts, (flat, "passage", keys[2])])
    count = negatives.shape[1]
    if hasattr(found, "in_lists"):
        return Embeddings(query, passage, found.in_lists(count))
    found = found.reshape(-1, count, found.shape[-1])
    return Embeddings(query, passage, constrain(found, ("batch", None, None)))
