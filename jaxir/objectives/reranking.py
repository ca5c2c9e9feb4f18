"""Trains a cross-encoder to rank a query's relevant passage above its hard negatives."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxir.core.errors import UserError
from jaxir.core.features import Features, TextFormat
from jaxir.core.values import checked
from jaxir.losses.ranking import list_softmax
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.objective import Batch, LossObjective, Metrics, RandomKey
from jaxir.objectives.pair_batch import pair_features
from jaxir.runtime.partitioning import constrain


class Scorer(Protocol):
    """A model that scores pairs of a query and a passage: token ids [B, Lq] and [B, Lp] to scores [B]."""

    def score_texts(self, query_ids: jax.Array, passage_ids: jax.Array, *, key: RandomKey) -> jax.Array: ...


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ScoringObjective(LossObjective):
    """The base of objectives that train a cross-encoder on lists of candidates.

    Attributes:
      chunks: the number of parts of the batch that are scored one after the other. A step then keeps the
        activations of only one part in memory, and needs a second forward pass. 1: no parts.
    """

    evaluated_on_pairs = False
    searched_on_pairs = False
    reads_with = "score_texts"

    @abc.abstractmethod
    def _score(self, model: Any, ids: Batch, key: RandomKey) -> jax.Array:
        """Returns the scores [B, N] of the lists of a batch, given its arrays of token ids."""

    def scores(self, model: Any, batch: Batch, key: RandomKey = None) -> jax.Array:
        """Returns the scores [B, N] of each query's list of N candidates.

        Raises:
          UserError: `chunks` does not divide B.
        """
        ids = {name: x for name, x in batch.items() if name.endswith("_ids")}
        return embed_in_chunks(lambda part, key: self._score(model, part, key), ids, key, chunks=self.chunks)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class Reranking(ScoringObjective):
    """Applies the loss to the scores of each query's positive and hard negatives; no others are scored.

    Attributes:
      loss: a loss of `jaxir.losses.ranking` with its settings bound, called as
        loss(positive [B], negatives [B, N], kept [B, N]) -> (scalar, metrics).
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = list_softmax

    def features(self, form: TextFormat) -> Features:
        """Returns the features of a batch: pairs with hard negatives.

        Raises:
          UserError: the format has no hard negatives, or the model reads expanded queries.
        """
        if form.reads != "pair":
            raise UserError(
                f"this cross-encoder reads {form.reads!r}, but reranking passages needs a model that reads"
                " 'pair': set the model's reads to 'pair'"
            )
        if not form.num_negatives:
            raise UserError("a cross-encoder learns from hard negatives: set num_negatives to 1 or more")
        return pair_features(form)

    def _score(self, model: Scorer, ids: Batch, key: RandomKey) -> jax.Array:
        passages = jnp.concatenate([ids["passage_ids"][:, None], ids["negative_ids"]], axis=1)
        return score_lists(model, ids["query_ids"], passages, key)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        scores = self.scores(model, batch, key)
        # Leave out negatives with the same key (a hash of the text's id) as the positive.
        kept = (batch["negative_key"] != batch["passage_key"][:, None]).any(-1)
        return self.loss(scores[:, 0], scores[:, 1:], kept)


def score_lists(
    model: Scorer, query_ids: jax.Array, passage_ids: jax.Array, key: RandomKey = None
) -> jax.Array:
    """Returns the scores [B, C] of each query, token ids [B, Lq], with its own C passages [B, C, Lp]."""
    rows, count = passage_ids.shape[:2]
    queries = jnp.broadcast_to(query_ids[:, None], (rows, count, query_ids.shape[1]))
    # Reshape [B, C, L] to [B C, L] with this sharding, so that rows stay on their devices.
    flat = (constrain(x.reshape(rows * count, -1), ("batch", None)) for x in (queries, passage_ids))
    return constrain(model.score_texts(*flat, key=key).reshape(rows, count), ("batch", None))
