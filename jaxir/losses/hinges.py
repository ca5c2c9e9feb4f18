"""Margin and triplet losses: a positive should be nearer than the nearest negative, or than a bound."""

from typing import Literal

import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Float32, Int32, jaxtyped

from jaxir.core.values import PositiveNumber
from jaxir.losses import _rows

# Which negatives of a row count: the most similar one, or the mean over all.
Choice = Literal["hardest", "mean"]


@jaxtyped(typechecker=beartype)
def margin(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None = None,
    *,
    query_key: Int32[Array, "B 2"] | None = None,
    passage_key: Int32[Array, "B 2"] | None = None,
    negative_key: Int32[Array, "B N 2"] | None = None,
    alpha: int | float = 0.1,
    beta: int | float = 0.5,
    choice: Choice = "hardest",
    same_tower: bool = False,
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """The margin loss (Chopra et al. 2005; Wang 2022, eq. 2.3), with dist(a, b) = 1 - a . b:

        loss = 1 / B sum_i ( max(0, dist(x_i, y_i) - alpha) + max(0, beta - dist(x_i, n_i)) )

    The equation is printed as a sum with a minus before it, which would be least where positives lie far
    apart: the minus is left out, and the sum is a mean, so that no rate depends on the batch.

    Args:
      query: [B, D], x; row i pairs with row i of `passage`.
      passage: [B, D], y.
      negatives: [B, N, D] hard negatives; each is a negative of every query.
      query_key: [B, 2]; rows with an equal query or passage key are no negatives of each other.
      passage_key: [B, 2], likewise.
      negative_key: [B, N, 2]; a hard negative with row i's passage key is none of row i's.
      alpha: positives farther apart than this cost.
      beta: negatives nearer than this cost.
      choice: whether n_i is the most similar of the row's negatives, or the mean over all is taken.
      same_tower: whether the other queries are negatives too.

    Returns:
      The loss and, float32 [], `accuracy` (rows whose passage is nearer than all negatives),
      `positive_similarity`, `rows_without_negatives`.
    """
    others = ("passages", "negatives", "queries")[: 2 + same_tower]
    row = _rows.similarities(query, passage, negatives, (query_key, passage_key, negative_key), others)
    near = jnp.maximum(0.0, 1.0 - row.positive - alpha).mean()
    far = _over_negatives(jnp.maximum(0.0, beta - 1.0 + row.negative), row, choice).mean()
    return near + far, _rows.nearness(row)


@jaxtyped(typechecker=beartype)
def triplet(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None = None,
    *,
    query_key: Int32[Array, "B 2"] | None = None,
    passage_key: Int32[Array, "B 2"] | None = None,
    negative_key: Int32[Array, "B N 2"] | None = None,
    epsilon: PositiveNumber = 0.2,
    choice: Choice = "hardest",
    same_tower: bool = False,
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """The triplet loss (Schroff et al. 2015; Wang 2022, eq. 2.4):

        loss = 1 / B sum_i max(0, x_i . n_i - x_i . y_i + epsilon)

    `same_tower=True` is what Moiseev et al. 2023 leave to future work: same tower negatives beyond the
    softmax. Arguments and metrics are those of `margin`; `epsilon` is the least offset of the similarities.
    """
    others = ("passages", "negatives", "queries")[: 2 + same_tower]
    row = _rows.similarities(query, passage, negatives, (query_key, passage_key, negative_key), others)
    slack = jnp.maximum(0.0, row.negative - row.positive[:, None] + epsilon)
    return _over_negatives(slack, row, choice).mean(), _rows.nearness(row)


def _over_negatives(slack: Float32[Array, "B M"], row: _rows.Row, choice: Choice) -> Float32[Array, " B"]:
    """Returns what each row's negatives cost: a row without any costs nothing."""
    slack = jnp.where(row.kept, slack, 0.0)
    if choice == "hardest":  # slack grows with the similarity
        return slack.max(1)
    return slack.sum(1) / jnp.maximum(row.kept.sum(1, dtype=jnp.float32), 1.0)
