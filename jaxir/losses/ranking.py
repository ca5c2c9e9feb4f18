"""Losses of scored lists: a query's relevant passage and its negatives, or a question's expansions."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import NotNegativeNumber, PositiveNumber
from jaxir.losses._types import Metrics, Scalar


@checked_shapes
def binary_cross_entropy(
    positive: Float32[Array, " B"],
    negatives: Float32[Array, "B N"],
    kept: Bool[Array, "B N"],
    *,
    positive_weight: PositiveNumber = 1.0,
) -> tuple[Scalar, Metrics]:
    """Pointwise: classifies each passage by itself (Nogueira & Cho 2019, arXiv:1901.04085, eq. 1).

    The mean over the kept passages of -w log sigmoid(s) for positives and -log sigmoid(-s) for negatives,
    with scores s. Metrics and the other arguments are those of `list_softmax`.

    Args:
      positive_weight: w; with w = N positives and negatives have equal weight.
    """
    count = positive.size + kept.sum(dtype=jnp.float32)
    of_positives = -jax.nn.log_sigmoid(positive).sum() * positive_weight
    of_negatives = -jnp.where(kept, jax.nn.log_sigmoid(-negatives), 0.0).sum()
    return (of_positives + of_negatives) / count, _metrics(positive, negatives, kept)


@checked_shapes
def list_softmax(
    positive: Float32[Array, " B"],
    negatives: Float32[Array, "B N"],
    kept: Bool[Array, "B N"],
    *,
    temperature: PositiveNumber = 1.0,
) -> tuple[Scalar, Metrics]:
    """Listwise: the mean of -log softmax(s / temperature)[positive] over a query's own passages.

    Gao et al. 2021 (Rethink Training of BERT Rerankers, arXiv:2101.08751, eq. 3: localised contrastive
    estimation).

    Args:
      kept: [B, N], false for a negative that is the same passage as the positive: it is left out.
      temperature: divides the scores.

    Returns:
      The loss and the metrics `accuracy` (the share of lists whose positive scores above all negatives),
      `positive_score` and `negative_score` (means).
    """
    scores = jnp.concatenate([positive[:, None], jnp.where(kept, negatives, -jnp.inf)], axis=1) / temperature
    return -jax.nn.log_softmax(scores)[:, 0].mean(), _metrics(positive, negatives, kept)


@checked_shapes
def margin_ranking(
    positive: Float32[Array, " B"],
    negatives: Float32[Array, "B N"],
    kept: Bool[Array, "B N"],
    *,
    margin: PositiveNumber = 1.0,
) -> tuple[Scalar, Metrics]:
    """Pairwise: the mean of max(0, margin - (s(positive) - s(negative))) over the kept negatives.

    Metrics and the other arguments are those of `list_softmax`.

    Args:
      margin: by how much the score of a positive should exceed that of a negative.
    """
    short = jax.nn.relu(margin - (positive[:, None] - negatives))
    return jnp.where(kept, short, 0.0).sum() / _count(kept), _metrics(positive, negatives, kept)


@checked_shapes
def rank_margin(
    scores: Float32[Array, "B N"],
    ranks: Float32[Array, "B N"],
    kept: Bool[Array, "B N"],
    *,
    alpha: NotNegativeNumber = 0.01,
    reduction: Literal["sum", "by_distance"] = "sum",
) -> tuple[Scalar, Metrics]:
    """Pairwise, by ranks (EAR; Chuang 2024, section 3.3.1, L_Rank). Over a list's candidates,

        sum over r_i < r_j of max(0, s_j - s_i + alpha (r_j - r_i))

    with scores s (higher is better), and the ranks r at which candidates find an answer (lower is better).
    The paper's model M estimates ranks; s is -M. The loss is the mean over the lists.

    Args:
      kept: [B, N], false for candidates to leave out.
      alpha: the margin for each rank of difference; 0.01 in the authors' code.
      reduction: "sum" over the pairs is the equation. "by_distance" is the authors' code (github.com/
        voidism/EAR): candidates are sorted by rank, equal ranks are pairs with margin 0, and the means over
        the pairs that are d positions apart are averaged over d.

    Returns:
      The loss and the metrics `accuracy` (the share of lists in which a candidate of the least rank has the
      highest score), `chosen_rank` (the mean rank of the candidates with the highest scores) and
      `least_rank`.
    """
    # [B, i, j]: i is the better candidate of the pair, or the first of equals.
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
