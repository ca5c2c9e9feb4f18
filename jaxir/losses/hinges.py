"""Margin and triplet losses: a positive should be nearer than the negatives, or than a bound."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import PositiveNumber
from jaxir.losses import _rows
from jaxir.losses._types import Keys, Metrics, NegativeKeys, Negatives, Scalar, Vectors
from jaxir.losses.guide import Guide

Choice = Literal["hardest", "mean"]


@checked_shapes
def margin(
    query: Vectors,
    passage: Vectors,
    negatives: Negatives | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    guide: Guide | None = None,
    alpha: int | float = 0.1,
    beta: int | float = 0.5,
    choice: Choice = "hardest",
    same_tower: bool = False,
) -> tuple[Scalar, Metrics]:
    """The margin loss (Chopra et al. 2005; Wang 2022, eq. 2.3), with dist(a, b) = 1 - a . b:

        loss = 1 / B sum_i ( max(0, dist(x_i, y_i) - alpha) + max(0, beta - dist(x_i, n_i)) )

    x are queries [B, D], y passages. The thesis prints a negated sum, which would be least where positives
    lie far apart. Here the minus is left out, and the sum is a mean, so that a suitable learning rate does
    not depend on the batch size. Arrays and keys are those of `in_batch_softmax`.

    Args:
      alpha: the distance above which a positive adds to the loss.
      beta: the distance below which a negative adds to the loss.
      choice: "hardest": n_i is the most similar negative of the row; "mean": the mean over all negatives.
      same_tower: whether the other queries are negatives too.

    Returns:
      The loss and the metrics `accuracy` (the share of rows whose passage is nearer than all negatives),
      `positive_similarity` and `rows_without_negatives`.
    """
    keys = (query_key, passage_key, negative_key)
    row = _rows.similarities(query, passage, negatives, keys, guide, _OTHERS[: 2 + same_tower])
    near = jnp.maximum(0.0, 1.0 - row.positive - alpha).mean()
    far = _over_negatives(jnp.maximum(0.0, beta - 1.0 + row.negative), row, choice).mean()
    return near + far, row.metrics()


@checked_shapes
def triplet(
    query: Vectors,
    passage: Vectors,
    negatives: Negatives | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    guide: Guide | None = None,
    epsilon: PositiveNumber = 0.2,
    choice: Choice = "hardest",
    same_tower: bool = False,
) -> tuple[Scalar, Metrics]:
    """The triplet loss (Schroff et al. 2015; Wang 2022, eq. 2.4):

        loss = 1 / B sum_i max(0, x_i . n_i - x_i . y_i + epsilon)

    `same_tower=True` applies same tower negatives beyond the softmax, which Moiseev et al. 2023 leave to
    future work. Metrics and the other arguments are those of `margin`; `epsilon` is the margin between
    similarities.
    """
    keys = (query_key, passage_key, negative_key)
    row = _rows.similarities(query, passage, negatives, keys, guide, _OTHERS[: 2 + same_tower])
    slack = jnp.maximum(0.0, row.negative - row.positive[:, None] + epsilon)
    return _over_negatives(slack, row, choice).mean(), row.metrics()


_OTHERS = ("passages", "negatives", "queries")


def _over_negatives(
    slack: Float32[Array, "B M"], row: _rows.Similarities, choice: Choice
) -> Float32[Array, " B"]:
    """Returns the cost of each row's negatives: 0 for a row without negatives."""
    slack = jnp.where(row.kept, slack, 0.0)
    if choice == "hardest":  # the most similar negative has the largest slack
        return slack.max(1)
    return slack.sum(1) / jnp.maximum(row.kept.sum(1, dtype=jnp.float32), 1.0)
