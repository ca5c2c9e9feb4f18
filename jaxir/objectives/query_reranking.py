"""Trains a cross-encoder to rank expansions of a question by the rank at which each finds an answer (EAR)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Key, Numbers, TextFormat, Tokens
from jaxir.core.values import Count, checked
from jaxir.losses.ranking import rank_margin
from jaxir.objectives.objective import Batch, Metrics, RandomKey
from jaxir.objectives.reranking import Scorer, ScoringObjective
from jaxir.runtime.partitioning import constrain


class QueryScorer(Scorer, Protocol):
    """A `Scorer` that also scores single sequences: token ids and token types [B, L] to scores [B]."""

    def score(self, ids: jax.Array, token_types: jax.Array, *, key: RandomKey) -> jax.Array: ...


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class QueryReranking(ScoringObjective):
    """Trains a reranker to order each question's candidates (expanded queries) by the ranks of their answers.

    Chuang 2024, section 3.3: the retrieval-independent reranker (a model that `reads` "expanded_query")
    scores [CLS] question ? expansion [SEP]. The retrieval-dependent reranker (a model that `reads`
    "expanded_query_and_passage") also reads the first passage that the query finds.

    Attributes:
      loss: a loss of `jaxir.losses.ranking` with its settings bound, called as
        loss(scores [B, N], ranks [B, N], kept [B, N]) -> (scalar, metrics).
      candidates: N, the number of candidates per question in a batch; each epoch draws N if there are more.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = rank_margin
    candidates: Count = 50

    def features(self, form: TextFormat) -> Features:
        """Returns the features query_ids [N, Lq], query_key [N, 2], ranks [N]; if read, passage_ids [N, Lp].

        Raises:
          UserError: the model reads pairs of a query and a passage.
        """
        return query_features(form, self.candidates)

    def _score(self, model: QueryScorer, ids: Batch, key: RandomKey) -> jax.Array:
        return score_candidates(model, ids, key)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        # If a question has fewer than N candidates, they are repeated; the loss only uses the first copies.
        keys = batch["query_key"]
        same = (keys[:, :, None] == keys[:, None]).all(-1)
        kept = ~jnp.tril(same, -1).any(2)
        return self.loss(self.scores(model, batch, key), batch["ranks"], kept)


def query_features(form: TextFormat, count: int) -> Features:
    """Returns the features that a model of `form` reads, of questions with `count` candidates each."""
    if form.reads == "pair":
        raise UserError(
            "a reranker of queries cannot read a query and a passage as a 'pair': set the model's reads to"
            " 'expanded_query' or 'expanded_query_and_passage'"
        )
    queries = Tokens("queries", form.query_length, form.query_prompt, count=count)
    found = {"query_ids": queries, "query_key": Key("queries", count), "ranks": Numbers("ranks", count)}
    if form.reads == "expanded_query_and_passage":
        found["passage_ids"] = Tokens("passages", form.passage_length, form.passage_prompt, count=count)
    return found


def score_candidates(model: QueryScorer, ids: Batch, key: RandomKey = None) -> jax.Array:
    """Returns the scores [B, N] of query_ids [B, N, Lq], each paired with passage_ids [B, N, Lp] if given."""
    rows, count = ids["query_ids"].shape[:2]
    # Reshape [B, N, L] to [B N, L] with this sharding, so that rows stay on their devices.
    flat = {name: constrain(x.reshape(rows * count, -1), ("batch", None)) for name, x in ids.items()}
    if "passage_ids" in flat:
        scores = model.score_texts(flat["query_ids"], flat["passage_ids"], key=key)
    else:
        scores = model.score(flat["query_ids"], jnp.zeros_like(flat["query_ids"]), key=key)
    return constrain(scores.reshape(rows, count), ("batch", None))
