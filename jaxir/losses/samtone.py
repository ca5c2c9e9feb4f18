"""SamToNe: in-batch softmax with same tower negatives."""

from typing import Literal

import jax.numpy as jnp

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, PositiveNumber
from jaxir.losses import _rows, _sums
from jaxir.losses._tiles import GradientPrecision
from jaxir.losses._types import (
    Embedded,
    EmbeddedNegatives,
    Keys,
    Metrics,
    NegativeKeys,
    Scalar,
    TokenVectors,
)
from jaxir.losses.guide import Guide


@checked_shapes
def samtone(
    query: Embedded,
    passage: Embedded,
    negatives: EmbeddedNegatives | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    guide: Guide | None = None,
    temperature: PositiveNumber = 0.01,
    bidirectional: bool = True,
    same_tower: Literal["query", "passage", "both"] = "query",
    block_size: Count | None = None,
    gradient_precision: GradientPrecision = "highest",
) -> tuple[Scalar, Metrics]:
    """Contrastive loss with SAMe TOwer NEgatives (Moiseev et al. 2023, eq. 2).

    The denominator of the in-batch softmax also sums over the other rows of the same tower, at the same
    temperature. Query side, with s(a, b) = a . b / temperature:

        loss_i = -log( exp s(q_i, p_i) / (sum_j exp s(q_i, p_j) + sum_{j != i} exp s(q_i, q_j)) )

    Passage side: sum_{j != i} exp s(p_i, p_j) joins the denominator of the passage-to-query direction. The
    other arguments are those of `in_batch_softmax`.

    Args:
      same_tower: the tower whose rows are negatives of each other. The paper trains with "query"; "passage"
        and "both" (section 3.4) hurt where passages repeat within a batch, unless keys are given.

    Returns:
      The loss and the metrics of `in_batch_softmax`, with `query_query_similarity` and
      `passage_passage_similarity`, the mean similarity of different rows of a tower with such negatives.

    Raises:
      UserError: the temperature or block_size is not positive, or same_tower includes passages without
        `bidirectional` or with `TokenVectors`.
    """
    if same_tower != "query" and isinstance(query, TokenVectors):
        raise UserError(
            f'same_tower="{same_tower}" compares passages with each other, but MaxSim then sums over as many'
            ' tokens as each passage has: set same_tower to "query"'
        )
    if same_tower != "query" and not bidirectional:
        raise UserError(
            f'same_tower="{same_tower}" needs bidirectional=True: passages are negatives of each other in the'
            " passage-to-query direction"
        )
    keys = (query_key, passage_key, negative_key)
    sums = _sums.of_batch(query, passage, negatives, keys, guide, temperature, block_size, gradient_precision)
    terms = sums.in_batch(bidirectional=bidirectional)
    similarity = {}
    if same_tower in ("query", "both"):
        others, similarity["query_query_similarity"] = sums.same_tower("query")
        terms = terms._replace(query_to_passage=jnp.logaddexp(terms.query_to_passage, others))
    if same_tower in ("passage", "both"):
        others, similarity["passage_passage_similarity"] = sums.same_tower("passage")
        terms = terms._replace(passage_to_query=jnp.logaddexp(terms.passage_to_query, others))
    loss, metrics = _rows.softmax_loss(terms, temperature=temperature, bidirectional=bidirectional)
    return loss, metrics | similarity
