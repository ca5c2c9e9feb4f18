"""GISTEmbed's softmax: passages, hard negatives and both towers share one denominator."""

from typing import Literal

import jax.numpy as jnp

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, PositiveNumber
from jaxir.losses import _rows, _sums
from jaxir.losses._tiles import GradientPrecision
from jaxir.losses._types import Keys, Metrics, NegativeKeys, Negatives, Scalar, Vectors
from jaxir.losses.guide import Guide


@checked_shapes
def gist(
    query: Vectors,
    passage: Vectors,
    negatives: Negatives | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    guide: Guide | None = None,
    temperature: PositiveNumber = 0.01,
    same_tower: Literal["query", "passage", "both"] = "both",
    block_size: Count | None = None,
    gradient_precision: GradientPrecision = "highest",
) -> tuple[Scalar, Metrics]:
    """The softmax of GISTEmbed (Solatorio 2024, arXiv:2402.16829). With s(a, b) = a . b / temperature:

        loss_i = -log( exp s(q_i, p_i) / (sum_j exp s(q_i, p_j) + sum_h exp s(q_i, n_h)
                                          + sum_{j != i} (exp s(q_i, q_j) + exp s(p_i, p_j))) )

    The loss is the mean over rows; it has one direction. Each sum leaves out duplicates, and the negatives
    that the guide masks. The other arguments are those of `in_batch_softmax`.

    Args:
      same_tower: the tower whose rows are negatives of each other; sentence-transformers' GISTEmbedLoss names
        them contrast_anchors ("query") and contrast_positives ("passage"). With "query" the loss is the
        `samtone` of one direction.

    Returns:
      The loss and the metrics of `samtone`.

    Raises:
      UserError: the temperature or block_size is not positive.
    """
    keys = (query_key, passage_key, negative_key)
    sums = _sums.of_batch(query, passage, negatives, keys, guide, temperature, block_size, gradient_precision)
    terms = sums.in_batch(bidirectional=False)
    similarity = {}
    for tower in ("query", "passage"):
        if same_tower in (tower, "both"):
            others, similarity[f"{tower}_{tower}_similarity"] = sums.same_tower(tower)
            terms = terms._replace(query_to_passage=jnp.logaddexp(terms.query_to_passage, others))
    loss, metrics = _rows.softmax_loss(terms, temperature=temperature, bidirectional=False)
    return loss, metrics | similarity
