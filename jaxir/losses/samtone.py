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

    Args:
      query: [B, D], row i pairs with row i of `passage`.
      passage: [B, D].
      negatives: [B, N, D] hard negatives; each is a negative of every query.
      query_key: [B, 2] halves of a 64-bit hash of the query's id. A row j != i whose query key or passage key
        equals row i's is left out of all of row i's sums, the same-tower ones included. None masks nothing.
      passage_key: [B, 2], likewise for passages.
      negative_key: [B, N, 2]; a hard negative with row i's passage key is left out of row i's sum.
      temperature: divides the similarities; positive.
      bidirectional: whether to add the passage-to-query direction (the paper does).
      same_tower: which tower's rows are negatives of each other. The paper trains with "query"; "passage" and
        "both" (section 3.4) hurt where passages repeat within a batch, unless keys are given.
      block_size: None makes [B, B] matrices. A number computes the same loss and gradient in tiles of at most
        so many rows and columns, in memory linear in B; on a mesh, over a ring of the devices that split the
        batch (docs/large_batches.md).
      gradient_precision: with a block_size, of the products that make gradients from the logits' slopes:
        "high" and "default" are quicker on accelerators, with a small error (docs/large_batches.md).

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
    sums = _sums.of_batch(
        query,
        passage,
        negatives,
        query_key=query_key,
        passage_key=passage_key,
        negative_key=negative_key,
        temperature=temperature,
        block_size=block_size,
        gradient_precision=gradient_precision,
    )
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
