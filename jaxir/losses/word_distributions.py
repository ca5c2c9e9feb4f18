"""Losses of predicted word distributions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import PositiveNumber
from jaxir.losses import _rows
from jaxir.losses._types import Keys, Metrics, Scalar
from jaxir.runtime.partitioning import batch_shards, constrain


@checked_shapes
def bag_of_words(
    logits: Float32[Array, "B V"],
    present: Bool[Array, "B V"],
    *,
    weights: Float32[Array, " V"] | None = None,
) -> tuple[Scalar, Metrics]:
    """The binary cross-entropy of which words a text has (Ma et al. 2022, eq. 3 and 4).

        loss = -1 / B sum_i sum_j w_j ( y_ij log sigmoid(z_ij) + (1 - y_ij) log(1 - sigmoid(z_ij)) )

    z are logits [B, V], y whether text i has word j, and w weights [V] of words, by default 1. The paper
    prints the last logarithm without "1 -", which would predict every word everywhere. The metric
    `word_recall` is the share of the texts' words with a probability above a half.
    """
    terms = jax.nn.softplus(logits) - jnp.where(present, logits, 0.0)
    if weights is not None:
        terms *= weights[None]
    count = jnp.maximum(present.sum(dtype=jnp.float32), 1.0)
    recall = (present & (logits > 0)).sum(dtype=jnp.float32) / count
    return terms.sum(1).mean(), {"word_recall": recall}


@checked_shapes
def log_normalised_sigmoid(logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Returns log( sigmoid(z_j) / sum_k sigmoid(z_k) ) of logits z [B, V]; finite for any finite z."""
    return jax.nn.log_softmax(jax.nn.log_sigmoid(logits), axis=1)


@checked_shapes
def js_softmax(
    first: Float32[Array, "B V"],
    second: Float32[Array, "B V"],
    *,
    key: Keys | None = None,
    temperature: PositiveNumber = 1.0,
) -> tuple[Scalar, Metrics]:
    """Contrasts the word distributions of two views of each text (Ma et al. 2022, eq. 5): the mean of

        loss_i = -log( exp -JS(p_i, q_i) / (sum_k exp -JS(p_i, q_k) + sum_{k != i} exp -JS(p_i, p_k)) )

    Args:
      first: [B, V], log p.
      second: [B, V], log q.
      key: [B, 2], the key of each text: rows with equal keys are not negatives of each other.
      temperature: divides JS; the paper has none.

    Returns:
      The loss and the metrics `accuracy` (the share of rows whose own q is nearer than any negative),
      `positive_divergence` (the mean of JS(p_i, q_i)) and `rows_without_negatives`.
    """
    rows = len(first)
    keep = _rows.keep_columns(rows, None, key, None, None)
    same, other = (-js_divergences(first, columns) / temperature for columns in (first, second))
    own = jnp.eye(rows, dtype=bool)
    positive = jnp.where(own, other, 0.0).sum(1)
    total = jnp.logaddexp(_rows.log_sum_exp(same, keep.query_tower), _rows.log_sum_exp(other, keep.passages))
    hardest = jnp.where(keep.query_tower, jnp.maximum(same, other), -jnp.inf).max(1)
    return (total - positive).mean(), {
        "accuracy": (positive > hardest).astype(jnp.float32).mean(),
        "positive_divergence": -positive.mean() * temperature,
        "rows_without_negatives": jnp.isneginf(hardest).astype(jnp.float32).mean(),
    }


@checked_shapes
def js_divergences(rows: Float32[Array, "B V"], columns: Float32[Array, "C V"]) -> Float32[Array, "B C"]:
    """Returns the Jensen-Shannon divergence of every row log p [B, V] and column log q [C, V], in nats:

        JS(p, q) = 1/2 sum_v ( p_v (log p_v - log m_v) + q_v (log q_v - log m_v) ),  m = (p + q) / 2

    This equals H(m) - (H(p) + H(q)) / 2, without the difference of large sums. Columns are processed one at a
    time, so no [B, C, V] array exists. On a mesh devices keep their rows and their part of the vocabulary.
    The devices that split the batch gather the columns, and sum the gradients of columns once.
    """
    return _divergences(*(constrain(side, ("batch", "vocab")) for side in (rows, columns)))


@jax.custom_vjp
def _divergences(rows: jax.Array, columns: jax.Array) -> jax.Array:
    p = jnp.exp(rows)

    def of_column(column: jax.Array) -> jax.Array:
        q = jnp.exp(column)[None]
        log_m = _log_mean(p, q)
        return (p * (rows - log_m) + q * (column[None] - log_m)).sum(1) / 2

    return constrain(jax.lax.map(of_column, constrain(columns, (None, "vocab"))).T, ("batch", None))


def _forward(rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _divergences(rows, columns), (rows, columns)


def _backward(saved: tuple[jax.Array, jax.Array], slopes: jax.Array) -> tuple[jax.Array, jax.Array]:
    # d JS / d log p = p (log p - log m) / 2: the terms through m cancel.
    rows, columns = saved
    groups = batch_shards(len(rows))  # [G, B / G, ...]: the rows of a device are a group

    def grouped(x: jax.Array, axis: str | None) -> jax.Array:
        return constrain(x.reshape(groups, -1, x.shape[1]), ("batch", None, axis))

    own, p = grouped(rows, "vocab"), grouped(jnp.exp(rows), "vocab")

    def of_column(total: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        column, slope = given[0][None, None], given[1][..., None]
        log_m = _log_mean(p, jnp.exp(column))
        of_group = (slope * (column - log_m)).sum(1)
        return total + slope * (own - log_m), constrain(of_group, ("batch", "vocab"))

    given = constrain(columns, (None, "vocab")), grouped(slopes, None).transpose(2, 0, 1)
    of_rows, of_columns = jax.lax.scan(of_column, jnp.zeros_like(own), given)
    of_columns = constrain(of_columns.sum(1), ("batch", "vocab"))
    return (p * of_rows / 2).reshape(rows.shape), jnp.exp(columns) * of_columns / 2


_divergences.defvjp(_forward, _backward)


def _log_mean(p: jax.Array, q: jax.Array) -> jax.Array:
    # If p and q are both 0, the logarithm is finite, and the caller multiplies it by 0.
    return jnp.log(jnp.maximum((p + q) / 2, jnp.finfo(jnp.float32).tiny))
