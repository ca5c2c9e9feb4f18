"""PAIR: in-batch softmax mixed with a passage-centric term."""

from typing import Annotated

import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Float32, Int32, jaxtyped

from jaxir.core.errors import UserError
from jaxir.core.values import Count, PositiveNumber, Within
from jaxir.losses import _rows, _sums
from jaxir.losses._tiles import GradientPrecision


@jaxtyped(typechecker=beartype)
def pair(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None = None,
    *,
    query_key: Int32[Array, "B 2"] | None = None,
    passage_key: Int32[Array, "B 2"] | None = None,
    negative_key: Int32[Array, "B N 2"] | None = None,
    temperature: PositiveNumber = 0.01,
    bidirectional: bool = True,
    alpha: Annotated[float | int, Within(0, 1)] = 0.1,
    block_size: Count | None = None,
    gradient_precision: GradientPrecision = "highest",
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """The PAIR loss (Ren et al. 2021), as Moiseev et al. 2023 print it in eq. 3.

    With s(a, b) = a . b / temperature:

        loss   = (1 - alpha) * in_batch_softmax - alpha * mean_i log L_P_i
        L_P_i  = exp s(q_i, p_i) / sum_{j != i} exp s(p_i, p_j)

    As printed, the denominator of L_P holds only the other passages: neither the numerator nor passage i
    stands in it, so L_P may exceed 1 and its term may be negative. A row with no other passage, alone in its
    batch or masked, has no L_P and adds 0. The original trains in two stages, PAIR first and
    `in_batch_softmax` after.

    Args:
      query: [B, D], row i pairs with row i of `passage`.
      passage: [B, D].
      negatives: [B, N, D] hard negatives; they are seen by the query-to-passage softmax only.
      query_key: [B, 2] halves of a 64-bit hash of the query's id. A row j != i whose query key or passage key
        equals row i's is left out of all of row i's sums, L_P's included. None masks nothing.
      passage_key: [B, 2], likewise for passages.
      negative_key: [B, N, 2]; a hard negative with row i's passage key is left out of row i's sum.
      temperature: divides the similarities; positive.
      bidirectional: whether the in-batch softmax has both directions; L_P has one.
      alpha: weight of the passage-centric term, in [0, 1].
      block_size: None makes [B, B] matrices. A number computes the same loss and gradient in tiles of at most
        so many rows and columns, in memory linear in B; on a mesh, over a ring of the devices that split the
        batch (docs/large_batches.md).
      gradient_precision: with a block_size, of the products that make gradients from the logits' slopes:
        "high" and "default" are quicker on accelerators, with a small error (docs/large_batches.md).

    Returns:
      The loss and the metrics of `in_batch_softmax`, with `loss_passage_centric` (the mean of -log L_P) and
      `passage_passage_similarity`, the mean similarity of different passages.

    Raises:
      UserError: the temperature or block_size is not positive, or alpha is outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha must lie in [0, 1], not {alpha}")
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
    loss, metrics = _rows.softmax_loss(terms, temperature=temperature, bidirectional=bidirectional)
    others, similarity = sums.same_tower(passage)
    some = jnp.isfinite(others)
    centric = jnp.mean(jnp.where(some, jnp.where(some, others, 0.0) - terms.positive, 0.0))
    metrics |= {"loss_passage_centric": centric, "passage_passage_similarity": similarity}
    return (1 - alpha) * loss + alpha * centric, metrics
