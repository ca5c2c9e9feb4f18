"""Training a cross-encoder to tell which expansion of a question will find its answer (EAR)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Key, Numbers, TextFormat, Tokens
from jaxir.core.values import Count, checked
from jaxir.losses.ranking import rank_margin
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.objective import Batch, LossObjective, Metrics
from jaxir.objectives.reranking import Scorer
from jaxir.runtime.partitioning import constrain


class QueryScorer(Scorer, Protocol):
    """What the objective asks of a model: token ids and types [B, L] to scores [B], and `Scorer`."""

    def score(self, ids: jax.Array, token_types: jax.Array, *, key: jax.Array | None) -> jax.Array: ...


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class QueryReranking(LossObjective):
    """Orders the candidates of each question by the ranks of the answers that they find.

    Chuang 2024, section 3.3: the retrieval-independent reranker (a model that `reads` "expanded_query")
    scores [CLS] question ? expansion [SEP], the retrieval-dependent one ("expanded_query_and_passage") that
    and the first passage that the query finds.

    Attributes:
      loss: of `jaxir.losses.ranking`, with its settings bound, called as
        loss(scores [B, N], ranks [B, N], kept [B, N]) -> (scalar, metrics).
      candidates: N, of a question in a batch; of more each epoch draws some.
      chunks: into how many parts the batch is cut to be scored one after the other: the step needs the
        activations of one part only, and a second forward pass.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = rank_margin
    candidates: Count = 50
    chunks: Count = 1
    evaluated_on_pairs = False
    searched_on_pairs = False
    reads_with = "score_texts"

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: query_ids [N, Lq], query_key [N, 2], ranks [N]; passage_ids [N, Lp].

        Raises:
          UserError: the model reads pairs of a query and a passage.
        """
        return query_features(form, self.candidates)

    def scores(self, model: QueryScorer, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Scores query_ids [B, N, Lq], with passage_ids [B, N, Lp] where there are any: [B, N].

        Raises:
          UserError: `chunks` does not divide B.
        """
        ids = {name: x for name, x in batch.items() if name.endswith("_ids")}
        return embed_in_chunks(
            lambda part, key: score_candidates(model, part, key), ids, key, chunks=self.chunks
        )

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: None = None,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        return self.loss(self.scores(model, batch, key), batch["ranks"], _firsts(batch["query_key"]))


def query_features(form: TextFormat, count: int) -> Features:
    """Returns the features of `count` candidates of a question, as a model of this format reads them.

    Raises:
      UserError: it reads pairs of a query and a passage.
    """
    if form.reads == "pair":
        raise UserError(
            "a reranker of queries must say what it reads: set its reads to 'expanded_query' or"
            " 'expanded_query_and_passage'"
        )
    queries = Tokens("queries", form.query_length, form.query_prompt, count=count)
    found = {"query_ids": queries, "query_key": Key("queries", count), "ranks": Numbers("ranks", count)}
    if form.reads == "expanded_query_and_passage":
        found["passage_ids"] = Tokens("passages", form.passage_length, form.passage_prompt, count=count)
    return found


def score_candidates(
    model: QueryScorer, ids: Mapping[str, jax.Array], key: jax.Array | None = None
) -> jax.Array:
    """Returns the scores [B, N] of query_ids [B, N, Lq], read with passage_ids [B, N, Lp] or alone."""
    rows, count = ids["query_ids"].shape[:2]
    # [B, N, L] is [B N, L]: rows stay on their devices.
    flat = {name: constrain(x.reshape(rows * count, -1), ("batch", None)) for name, x in ids.items()}
    if "passage_ids" in flat:
        scores = model.score_texts(flat["query_ids"], flat["passage_ids"], key=key)
    else:
        scores = model.score(flat["query_ids"], jnp.zeros_like(flat["query_ids"]), key=key)
    return constrain(scores.reshape(rows, count), ("batch", None))


def _firsts(keys: jax.Array) -> jax.Array:
    """Returns which items of each list [B, N, 2] were not there before: of few, some are repeated."""
    same = (keys[:, :, None] == keys[:, None]).all(-1)
    return ~jnp.tril(same, -1).any(2)
