"""PAIR: in-batch softmax mixed with a passage-centric term."""

from typing import Annotated

import jax.numpy as jnp

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, PositiveNumber, Within
from jaxir.losses import _rows, _sums
from jaxir.losses._tiles import GradientPrecision
from jaxir.losses._types import Keys, Metrics, NegativeKeys, Negatives, Scalar, Vectors
from jaxir.losses.guide import Guide


@checked_shapes
def pair(
    query: Vectors,
    passage: Vectors,
    negatives: Negatives | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    guide: Guide | None = None,
    temperature: PositiveNumber = 0.01,
    bidirectional: bool = True,
    alpha: Annotated[float | int, Within(0, 1)] = 0.1,
    block_size: Count | None = None,
    gradient_precision: GradientPrecision = "highest",
) -> tuple[Scalar, Metrics]:
    """The PAIR loss (Ren et al. 2021), as Moiseev et al. 2023 print it in eq. 3.

    With s(a, b) = a . b / temperature:

        loss   = (1 - alpha) * in_batch_softmax - alpha * mean_i log L_P_i
        L_P_i  = exp s(q_i, p_i) / sum_{j != i} exp s(p_i, p_j)

    As printed, the denominator of L_P sums over the other passages only, without the numerator. So L_P may
    exceed 1 and its term may be negative. A row whose other passages are all masked, or that is alone in its
    batch, adds 0. The original trains in two stages: PAIR first, then `in_batch_softmax`. The other arguments
    are those of `in_batch_softmax`.

    Args:
      bidirectional: whether the in-batch softmax has both directions; L_P has one.
      alpha: weight of the passage-centric term, in [0, 1].

    Returns:
      The loss and the metrics of `in_batch_softmax`, with `loss_passage_centric` (the mean of -log L_P) and
      `passage_passage_similarity`, the mean similarity of different passages.

    Raises:
      UserError: the temperature or block_size is not positive, or alpha is outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha must lie in [0, 1], not {alpha}")
    keys = (query_key, passage_key, negative_key)
    sums = _sums.of_batch(query, passage, negatives, keys, guide, temperature, block_size, gradient_precision)
    terms = sums.in_batch(bidirectional=bidirectional)
    loss, metrics = _rows.softmax_loss(terms, temperature=temperature, bidirectional=bidirectional)
    others, similarity = sums.same_tower("passage")
    some = jnp.isfinite(others)
    centric = jnp.mean(jnp.where(some, jnp.where(some, others, 0.0) - terms.positive, 0.0))
    metrics |= {"loss_passage_centric": centric, "passage_passage_similarity": similarity}
    return (1 - alpha) * loss + alpha * centric, metrics
