"""Training a cross-encoder to tell a query's relevant passage from its hard negatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxir.core.errors import UserError
from jaxir.core.features import Features, TextFormat
from jaxir.core.values import Count, checked
from jaxir.losses.ranking import list_softmax
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.objective import Batch, LossObjective, Metrics
from jaxir.objectives.pair_batch import pair_features
from jaxir.runtime.partitioning import constrain


class Scorer(Protocol):
    """What the objective asks of a model: token ids [B, Lq] and [B, Lp] to scores [B]."""

    def score_texts(
        self, query_ids: jax.Array, passage_ids: jax.Array, *, key: jax.Array | None
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class Reranking(LossObjective):
    """Scores each query's positive and hard negatives, one list for each; lists do not see each other.

    Attributes:
      loss: of `jaxir.losses.ranking`, with its settings bound, called as
        loss(positive [B], negatives [B, N], kept [B, N]) -> (scalar, metrics).
      chunks: into how many parts the batch is cut to be scored one after the other: the step needs the
        activations of one part only, and a second forward pass.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = list_softmax
    chunks: Count = 1
    evaluated_on_pairs = False
    searched_on_pairs = False
    reads_with = "score_texts"

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: pairs with hard negatives.

        Raises:
          UserError: there are to be no hard negatives, or the model reads expanded queries.
        """
        if form.reads != "pair":
            raise UserError(
                f"this cross-encoder reads {form.reads!r}, as a reranker of queries; set reads to 'pair'"
            )
        if not form.num_negatives:
            raise UserError("a cross-encoder learns from hard negatives: set num_negatives")
        return pair_features(form)

    def scores(self, model: Scorer, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Scores query_ids [B, Lq] with passage_ids [B, Lp] and negative_ids [B, N, Lp]: [B, 1 + N].

        Raises:
          UserError: `chunks` does not divide B.
        """
        ids = {name: x for name, x in batch.items() if name.endswith("_ids")}
        if self.chunks == 1:
            return _score(model, ids, key)
        return embed_in_chunks(lambda part, key: _score(model, part, key), ids, key, chunks=self.chunks)

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: None = None,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        scores = self.scores(model, batch, key)
        # A negative that is the positive itself says nothing.
        kept = (batch["negative_key"] != batch["passage_key"][:, None]).any(-1)
        return self.loss(scores[:, 0], scores[:, 1:], kept)


def _score(model: Scorer, ids: Mapping[str, jax.Array], key: jax.Array | None) -> jax.Array:
    passages = jnp.concatenate([ids["passage_ids"][:, None], ids["negative_ids"]], axis=1)
    return score_lists(model, ids["query_ids"], passages, key)


def score_lists(
    model: Scorer, query_ids: jax.Array, passage_ids: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Returns the scores [B, C] of each query [B, Lq] with its own passages [B, C, Lp]."""
    rows, count = passage_ids.shape[:2]
    queries = jnp.broadcast_to(query_ids[:, None], (rows, count, query_ids.shape[1]))
    # [B, C, L] is [B C, L]: rows stay on their devices.
    flat = (constrain(x.reshape(rows * count, -1), ("batch", None)) for x in (queries, passage_ids))
    return constrain(model.score_texts(*flat, key=key).reshape(rows, count), ("batch", None))
