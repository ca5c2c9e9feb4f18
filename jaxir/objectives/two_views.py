"""Contrastive learning without labels: two views of each text are a pair."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxir.core.features import Features, Key, TextFormat, Tokens
from jaxir.models.backbones import Edit
from jaxir.objectives.contrastive import Contrastive, Embeddings
from jaxir.objectives.objective import Batch, Metrics
from jaxir.runtime.partitioning import constrain


class View(NamedTuple):
    """How a text is read.

    Attributes:
      ids: [B, L] its tokens.
      key: of dropout; None turns it off.
      edit: changes the token vectors; None: nothing does.
    """

    ids: jax.Array
    key: jax.Array | None = None
    edit: Edit | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoViews(Contrastive, abc.ABC):
    """The base of SimCSE and its kin: any contrastive loss over two views of each text.

    The passage tower reads both. Texts that come twice in a batch are no negatives of each other. In
    evaluation nothing is random, and both views are the text itself.
    """

    loss_inputs = ("query_key", "passage_key")
    evaluated_on_pairs = False

    @abc.abstractmethod
    def views(self, ids: jax.Array, key: jax.Array) -> tuple[View, View]:
        """Returns the two views of texts [B, L]."""

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: text_ids [L], text_key [2]."""
        return {
            "text_ids": Tokens("text", form.passage_length, form.passage_prompt),
            "text_key": Key("text"),
        }

    def _embed_at_once(self, model: Any, batch: Batch, key: jax.Array | None) -> Embeddings:
        ids = batch["text_ids"]
        views = (View(ids), View(ids)) if key is None else self.views(ids, key)
        texts = [(view.ids, "passage", view.key) for view in views]
        pair = model.encode_together(texts, [view.edit for view in views])
        return Embeddings(*(constrain(side, ("batch", "affinity")) for side in pair))

    def loss_of(self, embeddings: Embeddings, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Applies the loss to the views of the whole batch; negatives, if there are some, are everybody's."""
        key = batch.get("text_key")
        pair = embeddings.query, embeddings.passage, embeddings.negatives
        return self.loss(*pair, query_key=key, passage_key=key)


def loss_of(chosen: Callable[..., Any] | Literal["own"], own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss that is chosen for several objectives, of which each has one of its `own`."""
    return own if chosen == "own" else chosen
