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

    Args that are not here are those of `hinges.margin`, and so are the metrics.

    Args:
      temperature: t.
      g: how it is used.
    """
    keys = (query_key, passage_key, negative_key)
    row = _rows.similarities(query, passage, negatives, keys, ("passages", "queries", "negatives"))

    def logit(s: jax.Array) -> jax.Array:
        if g == "quotient":
            return s / temperature
        some = jnp.maximum(jnp.abs(s), 1e-6)  # the slope at 0 is infinite
        return jnp.sign(s) * some**temperature

    of_negatives = jnp.where(row.kept, jax.nn.log_sigmoid(-logit(row.negative)), 0.0).sum(1)
    loss = -(jax.nn.log_sigmoid(logit(row.positive)) + of_negatives).mean()
    return loss, _rows.nearness(row)
