"""Contrastive learning without labels: two views of each text are a pair."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax

from jaxir.core.features import Features, Key, TextFormat, Tokens
from jaxir.models.backbones import Edit
from jaxir.objectives.contrastive import Contrastive, Embeddings
from jaxir.objectives.objective import Batch, Metrics, RandomKey
from jaxir.runtime.partitioning import constrain


class View(NamedTuple):
    """One of the two views of a batch of texts: what the encoder reads.

    Attributes:
      ids: [B, L], the token ids of the texts.
      key: the random key for dropout; None: no dropout.
      edit: a function that changes the token embeddings [B, L, E]; None: no change.
    """

    ids: jax.Array
    key: jax.Array | None = None
    edit: Edit | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoViews(Contrastive, abc.ABC):
    """The base of SimCSE and ConSERT: any contrastive loss over two views of each text.

    The passage tower encodes both views. A text that occurs twice in a batch is not a negative of itself. In
    evaluation nothing is random, and both views are the text itself.
    """

    loss_inputs = ("query_key", "passage_key")
    evaluated_on_pairs = False

    @abc.abstractmethod
    def views(self, ids: jax.Array, key: jax.Array) -> tuple[View, View]:
        """Returns the two views of texts [B, L], which a subclass defines; `key` is for all random draws."""

    def features(self, form: TextFormat) -> Features:
        """Returns the features of a batch: text_ids [L] and text_key [2], a hash of each text's id."""
        return {
            "text_ids": Tokens("text", form.passage_length, form.passage_prompt),
            "text_key": Key("text"),
        }

    def _embed_at_once(self, model: Any, batch: Batch, key: RandomKey) -> Embeddings:
        ids = batch["text_ids"]
        views = (View(ids), View(ids)) if key is None else self.views(ids, key)
        texts = [(view.ids, "passage", view.key) for view in views]
        pair = model.encode_together(texts, [view.edit for view in views])
        return Embeddings(*(constrain(side, ("batch", "affinity")) for side in pair))

    def loss_of(self, embeddings: Embeddings, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Applies the loss to the two views of the batch; each text is compared with all `negatives`."""
        key = batch.get("text_key")
        return self.loss(*embeddings, query_key=key, passage_key=key)
