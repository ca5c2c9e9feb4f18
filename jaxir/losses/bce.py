"""Binary cross-entropy over a batch: each pair is classified by itself."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import PositiveNumber
from jaxir.losses import _rows
from jaxir.losses._types import Keys, Metrics, NegativeKeys, Negatives, Scalar, Vectors
from jaxir.losses.guide import Guide


@checked_shapes
def bce(
    query: Vectors,
    passage: Vectors,
    negatives: Negatives | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    guide: Guide | None = None,
    temperature: PositiveNumber = 0.05,
    g: Literal["quotient", "power"] = "quotient",
) -> tuple[Scalar, Metrics]:
    """Binary cross-entropy (Wang 2022, eq. 2.10), with s(a, b) = a . b:

        loss = -1 / B sum_i ( log g(s(x_i, y_i)) + sum over n in N_i of log(1 - g(s(x_i, n))) )

    N_i are both sides of all other pairs, and the hard negatives. The thesis prints g(s) = sigmoid(s^t),
    which is not real for negative s and t = 0.05. "quotient" is sigmoid(s / t), as in the thesis' eq. 2.7;
    "power" is sigmoid(sign(s) |s|^t). Metrics and the other arguments are those of `hinges.margin`.

    Args:
      temperature: t.
      g: how t enters: "quotient" or "power".
    """
    keys = (query_key, passage_key, negative_key)
    row = _rows.similarities(query, passage, negatives, keys, guide, ("passages", "queries", "negatives"))

    def logit(s: jax.Array) -> jax.Array:
        if g == "quotient":
            return s / temperature
        some = jnp.maximum(jnp.abs(s), 1e-6)  # the slope at 0 is infinite
        return jnp.sign(s) * some**temperature

    of_negatives = jnp.where(row.kept, jax.nn.log_sigmoid(-logit(row.negative)), 0.0).sum(1)
    loss = -(jax.nn.log_sigmoid(logit(row.positive)) + of_negatives).mean()
    return loss, row.metrics()
