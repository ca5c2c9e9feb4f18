"""SamToNe: in-batch softmax with same tower negatives."""

from typing import Literal

import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Float32, Int32, jaxtyped

from jaxir.core.errors import UserError
from jaxir.core.values import Count, PositiveNumber
from jaxir.losses import _rows, _sums
from jaxir.losses._tiles import GradientPrecision


@jaxtyped(typechecker=beartype)
def samtone(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None = None,
    *,
    query_key: Int32[Array, "B 2"] | None = None,
    passage_key: Int32[Array, "B 2"] | None = None,
    negative_key: Int32[Array, "B N 2"] | None = None,
    temperature: PositiveNumber = 0.01,
    bidirectional: bool = True,
    same_tower: Literal["query", "passage", "both"] = "query",
    block_size: Count | None = None,
    gradient_precision: GradientPrecision = "highest",
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """Contrastive loss with SAMe TOwer NEgatives (Moiseev et al. 2023, eq. 2).

    The in-batch softmax with the other rows of the same tower in the same denominator, at the same
    temperature. Query side, with s(a, b) = a . b / temperature:

        loss_i = -log( exp s(q_i, p_i) / (sum_j exp s(q_i, p_j) + sum_{j != i} exp s(q_i, q_j)) )

    Passage side: sum_{j != i} exp s(p_i, p_j) joins the denominator of the passage-to-query direction.

    Args that are not here are those of `in_batch_softmax`.

    Args:
      same_tower: which tower's rows are negatives of each other. The paper trains with "query"; "passage" and
        "both" (section 3.4) hurt where passages repeat within a batch, unless keys are given.

    Returns:
      The loss and the metrics of `in_batch_softmax`, with `query_query_similarity` and
      `passage_passage_similarity`, the mean similarity of different rows, for the towers asked for.

    Raises:
      UserError: the temperature or block_size is not positive, or passages are to be negatives of each other
        in a loss without the passage-to-query direction.
    """
    if same_tower != "query" and not bidirectional:
        raise UserError(
            f'same_tower="{same_tower}" needs bidirectional=True: passages are negatives of each other in '
            "the passage-to-query direction"
        )
    keys = (query_key, passage_key, negative_key)
    sums = _sums.of_batch(query, passage, negatives, keys, temperature, block_size, gradient_precision)
    terms = sums.in_batch(bidirectional=bidirectional)
    similarity = {}
    if same_tower in ("query", "both"):
        others, similarity["query_query_similarity"] = sums.same_tower(query)
        terms = terms._replace(query_to_passage=jnp.logaddexp(terms.query_to_passage, others))
    if same_tower in ("passage", "both"):
        others, similarity["passage_passage_similarity"] = sums.same_tower(passage)
        terms = terms._replace(passage_to_query=jnp.logaddexp(terms.passage_to_query, others))
    loss, metrics = _rows.softmax_loss(terms, temperature=temperature, bidirectional=bidirectional)
    return loss, metrics | similarity
