"""Losses of scored lists: a query's relevant passage, and others that are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float32, jaxtyped

from jaxir.simple_types import PositiveNumber

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


def _count(kept: jax.Array) -> jax.Array:
    return jnp.maximum(kept.sum(dtype=jnp.float32), 1.0)


def _metrics(positive: jax.Array, negatives: jax.Array, kept: jax.Array) -> Metrics:
    first = ((positive[:, None] > negatives) | ~kept).all(1)
    return {
        "accuracy": first.astype(jnp.float32).mean(),
        "positive_score": positive.mean(),
        "negative_score": jnp.where(kept, negatives, 0.0).sum() / _count(kept),
    }
