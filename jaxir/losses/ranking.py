"""Losses of scored lists: a query's relevant passage and others that are not, a question's expansions."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float32, jaxtyped

from jaxir.core.values import NotNegativeNumber, PositiveNumber

Metrics = dict[str, Float32[Array, ""]]


@jaxtyped(typechecker=beartype)
def binary_cross_entropy(
    positive: Float32[Array, " B"],
    negatives: Float32[Array, "B N"],
    kept: Bool[Array, "B N"],
    *,
    positive_weight: PositiveNumber = 1.0,
) -> tuple[Float32[Array, ""], Metrics]:
    """Pointwise: each passage by itself is relevant or not (Nogueira & Cho 2019, arXiv:1901.04085, eq. 1).

    The mean, over all passages that are kept, of -w log sigmoid(s) for positives and -log sigmoid(-s) for
    negatives, s being their scores.

    Args:
      positive: [B] scores of the positives.
      negatives: [B, N] scores of the negatives.
      kept: [B, N], false for a negative that is the positive.
      positive_weight: w; N weighs both kinds alike.

    Returns:
      The loss and the metrics of `list_softmax`.
    """
    count = positive.size + kept.sum(dtype=jnp.float32)
    of_positives = -jax.nn.log_sigmoid(positive).sum() * positive_weight
    of_negatives = -jnp.where(kept, jax.nn.log_sigmoid(-negatives), 0.0).sum()
    return (of_positives + of_negatives) / count, _metrics(positive, negatives, kept)


@jaxtyped(typechecker=beartype)
def list_softmax(
    positive: Float32[Array, " B"],
    negatives: Float32[Array, "B N"],
    kept: Bool[Array, "B N"],
    *,
    temperature: PositiveNumber = 1.0,
) -> tuple[Float32[Array, ""], Metrics]:
    """Listwise: the mean of -log softmax(s / temperature)[positive] over a query's own passages.

    Gao et al. 2021 (Rethink Training of BERT Rerankers, arXiv:2101.08751, eq. 3: localised contrastive
    estimation).

    Args:
      positive: [B] scores of the positives.
      negatives: [B, N] scores of the negatives.
      kept: [B, N], false for a negative that is the positive: it has no place in the softmax.
      temperature: divides the scores.

    Returns:
      The loss and metrics, float32 []: `accuracy` (the share of lists whose positive is above all negatives),
      `positive_score` and `negative_score` (means).
    """
    scores = jnp.concatenate([positive[:, None], jnp.where(kept, negatives, -jnp.inf)], axis=1) / temperature
    return -jax.nn.log_softmax(scores)[:, 0].mean(), _metrics(positive, negatives, kept)


@jaxtyped(typechecker=beartype)
def margin_ranking(
    positive: Float32[Array, " B"],
    negatives: Float32[Array, "B N"],
    kept: Bool[Array, "B N"],
    *,
    margin: PositiveNumber = 1.0,
) -> tuple[Float32[Array, ""], Metrics]:
    """Pairwise: the mean of max(0, margin - (s(positive) - s(negative))) over the negatives that are kept.

    Args:
      positive: [B] scores of the positives.
      negatives: [B, N] scores of the negatives.
      kept: [B, N], false for a negative that is the positive.
      margin: by how much a positive is to lead.

    Returns:
      The loss and the metrics of `list_softmax`.
    """
    short = jax.nn.relu(margin - (positive[:, None] - negatives))
    return jnp.where(kept, short, 0.0).sum() / _count(kept), _metrics(positive, negatives, kept)


@jaxtyped(typechecker=beartype)
def rank_margin(
    scores: Float32[Array, "B N"],
    ranks: Float32[Array, "B N"],
    kept: Bool[Array, "B N"],
    *,
    alpha: NotNegativeNumber = 0.01,
    reduction: Literal["sum", "by_distance"] = "sum",
) -> tuple[Float32[Array, ""], Metrics]:
    """Pairwise, by ranks: one of rank r_i < r_j is to lead the other by alpha (r_j - r_i) (EAR).

    Chuang 2024, section 3.3.1, L_Rank: over a list's candidates,

        sum over r_i < r_j of max(0, s_j - s_i + alpha (r_j - r_i))

    Their model M estimates the rank, so that less is better; s is -M. The loss is the mean over the lists.

    Args:
      scores: [B, N], of a question's candidates: the greater, the better.
      ranks: [B, N], where each candidate finds an answer: the smaller, the better.
      kept: [B, N], false for an item that says nothing.
      alpha: the margin of one rank; 0.01 in the authors' code.
      reduction: "sum", over the pairs, is the equation. "by_distance" is the authors' code (github.com/
        voidism/EAR): candidates in the order of their ranks, equal ranks count as pairs with margin 0, and
        the mean over the pairs that are d places apart is averaged over d.

    Returns:
      The loss and metrics, float32 []: `accuracy` (the share of lists of which a candidate of the least rank
      has the greatest score), `chosen_rank` (the mean rank of those of the greatest scores), `least_rank`.
    """
    # [B, i, j]: i is the better one of the pair, or the first of equals.
    short = jax.nn.relu(scores[:, None] - scores[:, :, None] + alpha * (ranks[:, None] - ranks[:, :, None]))
    if reduction == "sum":
        pairs = ranks[:, :, None] < ranks[:, None]
        weights = jnp.where(pairs & kept[:, :, None] & kept[:, None], 1.0, 0.0)
    else:
        order = jnp.argsort(jnp.where(kept, ranks, jnp.inf), axis=1)
        place = jnp.argsort(order, axis=1)
        apart = (place[:, None] - place[:, :, None]).astype(jnp.float32)
        count = kept.sum(1, dtype=jnp.float32)[:, None, None]
        pairs = (apart > 0) & kept[:, :, None] & kept[:, None]
        weights = jnp.where(pairs, 1.0 / jnp.where(pairs, (count - apart) * (count - 1.0), 1.0), 0.0)
    loss = (weights * short).sum((1, 2)).mean()
    chosen = jnp.argmax(jnp.where(kept, scores, -jnp.inf), axis=1)
    rank = jnp.take_along_axis(ranks, chosen[:, None], axis=1)[:, 0]
    least = jnp.where(kept, ranks, jnp.inf).min(1)
    found = {"accuracy": (rank == least).astype(jnp.float32), "chosen_rank": rank, "least_rank": least}
    return loss, {name: value.mean() for name, value in found.items()}


def _count(kept: jax.Array) -> jax.Array:
    return jnp.maximum(kept.sum(dtype=jnp.float32), 1.0)


def _metrics(positive: jax.Array, negatives: jax.Array, kept: jax.Array) -> Metrics:
    first = ((positive[:, None] > negatives) | ~kept).all(1)
    return {
        "accuracy": first.astype(jnp.float32).mean(),
        "positive_score": positive.mean(),
        "negative_score": jnp.where(kept, negatives, 0.0).sum() / _count(kept),
    }
