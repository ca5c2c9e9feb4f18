"""Training a cross-encoder to rank a query's relevant passage above its hard negatives."""

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
    """A model that scores token ids [B, Lq] and [B, Lp] as pairs: [B]."""

    def score_texts(self, query_ids: jax.Array, passage_ids: jax.Array, *, key: RandomKey) -> jax.Array: ...


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ScoringObjective(LossObjective):
    """The base of objectives that train a cross-encoder on the scores of lists.

    Attributes:
      chunks: the number of parts of the batch that are scored one after the other: the step needs the
        activations of one part only, and a second forward pass.
    """

    evaluated_on_pairs = False
    searched_on_pairs = False
    reads_with = "score_texts"

    @abc.abstractmethod
    def _score(self, model: Any, ids: Batch, key: RandomKey) -> jax.Array:
        """Returns scores [B, N] of token ids."""

    def scores(self, model: Any, batch: Batch, key: RandomKey = None) -> jax.Array:
        """Returns the scores of each query's list: [B, N].

        Raises:
          UserError: `chunks` does not divide B.
        """
        ids = {name: x for name, x in batch.items() if name.endswith("_ids")}
        return embed_in_chunks(lambda part, key: self._score(model, part, key), ids, key, chunks=self.chunks)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class Reranking(ScoringObjective):
    """Scores each query's positive (first) and hard negatives as one list; lists are independent.

    Attributes:
      loss: a loss of `jaxir.losses.ranking` with its settings bound, called as
        loss(positive [B], negatives [B, N], kept [B, N]) -> (scalar, metrics).
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = list_softmax

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: pairs with hard negatives.

        Raises:
          UserError: the format has no hard negatives, or the model reads expanded queries.
        """
        if form.reads != "pair":
            raise UserError(
                f"this cross-encoder reads {form.reads!r}, as a reranker of queries; set reads to 'pair'"
            )
        if not form.num_negatives:
            raise UserError("a cross-encoder learns from hard negatives: set num_negatives")
        return pair_features(form)

    def _score(self, model: Scorer, ids: Batch, key: RandomKey) -> jax.Array:
        passages = jnp.concatenate([ids["passage_ids"][:, None], ids["negative_ids"]], axis=1)
        return score_lists(model, ids["query_ids"], passages, key)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        scores = self.scores(model, batch, key)
        # A negative that is the positive itself is left out.
        kept = (batch["negative_key"] != batch["passage_key"][:, None]).any(-1)
        return self.loss(scores[:, 0], scores[:, 1:], kept)


def score_lists(
    model: Scorer, query_ids: jax.Array, passage_ids: jax.Array, key: RandomKey = None
) -> jax.Array:
    """Returns the scores [B, C] of each query [B, Lq] with its own passages [B, C, Lp]."""
    rows, count = passage_ids.shape[:2]
    queries = jnp.broadcast_to(query_ids[:, None], (rows, count, query_ids.shape[1]))
    # [B, C, L] becomes [B C, L], so rows stay on their devices.
    flat = (constrain(x.reshape(rows * count, -1), ("batch", None)) for x in (queries, passage_ids))
    return constrain(model.score_texts(*flat, key=key).reshape(rows, count), ("batch", None))
