"""Binary cross-entropy over a batch: each pair by itself, a yes or a no."""

from typing import Literal

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Float32, Int32, jaxtyped

from jaxir.core.values import PositiveNumber
from jaxir.losses import _rows


@jaxtyped(typechecker=beartype)
def bce(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None = None,
    *,
    query_key: Int32[Array, "B 2"] | None = None,
    passage_key: Int32[Array, "B 2"] | None = None,
    negative_key: Int32[Array, "B N 2"] | None = None,
    temperature: PositiveNumber = 0.05,
    g: Literal["quotient", "power"] = "quotient",
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """Binary cross-entropy (Wang 2022, eq. 2.10), with s(a, b) = a . b:

        loss = -1 / B sum_i ( log g(s(x_i, y_i)) + sum over n in N_i of log(1 - g(s(x_i, n))) )

    where N_i are both sides of all other pairs, and hard negatives. Printed is g(s) = sigmoid(s^t), which is
    no real number for a negative s and t = 0.05: "quotient" is sigmoid(s / t), as temperatures are used in
    the same thesis' eq. 2.7; "power" is sigmoid(sign(s) |s|^t).

    Args:
      query: [B, D], x; row i pairs with row i of `passage`.
      passage: [B, D], y.
      negatives: [B, N, D] hard negatives; each is a negative of every query.
      query_key: [B, 2]; rows with an equal query or passage key are no negatives of each other.
      passage_key: [B, 2], likewise.
      negative_key: [B, N, 2]; a hard negative with row i's passage key is none of row i's.
      temperature: t.
      g: how it is used.

    Returns:
      The loss and, float32 [], `accuracy` (rows whose passage is nearer than all negatives),
      `positive_similarity`, `rows_without_negatives`.
    """
    keep = _rows.keep_columns(len(query), negatives, query_key, passage_key, negative_key)
    among = _rows.logits(query, passage, 1.0)
    columns, kept = [among, _rows.logits(query, query, 1.0)], [keep.same_tower, keep.same_tower]
    if negatives is not None:
        columns.append(_rows.logits(query, negatives.reshape(-1, negatives.shape[-1]), 1.0))
        kept.append(keep.negatives)
    positive, negative = jnp.diagonal(among), jnp.concatenate(columns, 1)
    is_negative = jnp.concatenate(kept, 1)

    def logit(s: jax.Array) -> jax.Array:
        if g == "quotient":
            return s / temperature
        some = jnp.maximum(jnp.abs(s), 1e-6)  # the slope at 0 is infinite
        return jnp.sign(s) * some**temperature

    of_negatives = jnp.where(is_negative, jax.nn.log_sigmoid(-logit(negative)), 0.0).sum(1)
    loss = -(jax.nn.log_sigmoid(logit(positive)) + of_negatives).mean()
    hardest = jnp.where(is_negative, negative, -jnp.inf).max(1)
    return loss, {
        "accuracy": (positive > hardest).astype(jnp.float32).mean(),
        "positive_similarity": positive.mean(),
        "rows_without_negatives": (~is_negative.any(1)).astype(jnp.float32).mean(),
    }
