"""MaxSim, the late interaction of ColBERT (Khattab and Zaharia 2020, arXiv 2004.12832), block by block.

The similarities of all tokens, [Q, P, Lq, Lp], never exist at once: a scan over blocks of passages reduces
each block to its maxima. For the gradient the scan stores which passage token each query token chose, in one
or two bytes each. The backward scan makes the slopes of each block again from these choices.

On a mesh, passages go round a ring of the devices that split the batch, so that no device holds all of them.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count
from jaxir.losses import _token_blocks as blocks
from jaxir.losses._token_blocks import EMPTY_PASSAGE
from jaxir.losses._types import TokenVectors
from jaxir.runtime import partitioning


@checked_shapes
def maxsim(
    queries: Float32[Array, "Q Lq D"],
    query_mask: Bool[Array, "Q Lq"],
    passages: Float32[Array, "P Lp D"],
    passage_mask: Bool[Array, "P Lp"],
    *,
    block_size: Count | None = None,
) -> Float32[Array, "Q P"]:
    """Sums, over a query's tokens, the largest dot product with any token of the passage.

    Args:
      queries: [Q, Lq, D] token vectors.
      query_mask: [Q, Lq], true at tokens to score.
      passages: [P, Lp, D].
      passage_mask: [P, Lp].
      block_size: number of passages that are compared at once with all queries; None: as many as give blocks
        of 16 MiB, at least one. It changes memory and time, not the result.

    Returns:
      scores [Q, P]; -1e9, without gradient, for passages without tokens. Of equally near passage tokens only
      the first has a gradient.

    Raises:
      UserError: block_size is not positive.
    """
    if block_size is not None and block_size < 1:
        raise UserError(f"block_size must be at least 1, not {block_size}")
    ring = blocks.ring_of(queries, passages)
    shards = 1 if ring is None else ring.size
    total, each = passages.shape[0], queries.shape[0] * queries.shape[1] * passages.shape[1]
    if not total * each:
        empty = ~passage_mask.any(1)[None]
        return jnp.where(empty, EMPTY_PASSAGE, jnp.zeros((queries.shape[0], total), jnp.float32))
    num_blocks = blocks.num_blocks(total // shards, each // shards, block_size)
    return _compared(num_blocks, ring, queries, query_mask, passages, passage_mask)


@checked_shapes
def maxsim_of_lists(
    queries: TokenVectors, lists: TokenVectors, *, block_size: Count | None = None
) -> Float32[Array, "B C"]:
    """Compares each query with the passages of its own list by `maxsim`.

    Args:
      queries: B queries, with vectors [B, Lq, D]; their `weight` multiplies the scores.
      lists: C passages for each query, with vectors [B, C, Lp, D].
      block_size: number of passages of each list that are compared at once, as in `maxsim`.

    Returns:
      scores [B, C], like those of `maxsim`.
    """
    (vectors, mask), (passages, passage_mask) = queries[:2], lists[:2]
    rows = len(mask) // partitioning.batch_shards(len(mask))
    num_blocks = blocks.num_blocks(mask.shape[1], rows * mask.shape[1] * passage_mask.shape[2], block_size)

    def of_list(vectors, mask, passages, passage_mask):
        return _compared(num_blocks, None, vectors[None], mask[None], passages, passage_mask)[0]

    scores = jax.vmap(of_list)(vectors, mask, passages, passage_mask)
    return scores if queries.weight is None else scores * queries.weight[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compared(num_blocks, ring, queries, query_mask, passages, passage_mask):
    def scores(*sides):
        return _scores_of_blocks(num_blocks, *sides), None

    return blocks.around(ring, scores, queries, query_mask, passages, passage_mask)[0]


def _forward(num_blocks, ring, queries, query_mask, passages, passage_mask):
    scores = functools.partial(_scores_and_choices, num_blocks)
    saved = queries, query_mask, passages, passage_mask
    found, chosen = blocks.around(ring, scores, *saved)
    return found, (*saved, chosen)


_compared.defvjp(_forward, blocks.backward)


def _scores_of_blocks(num_blocks, queries, query_mask, passages, passage_mask):
    def block(_, of_block: blocks.Passages):
        return None, _scores(blocks.similarities(queries, *of_block).max(3), query_mask, of_block[1])

    scores = jax.lax.scan(block, None, blocks.split(num_blocks, passages, passage_mask))[1]
    return blocks.join(scores, passages.shape[0])


def _scores_and_choices(num_blocks, queries, query_mask, passages, passage_mask):
    """Returns scores [Q, P] and the chosen tokens [N, Q, Lq, b] of N blocks of b passages."""

    def block(_, of_block: blocks.Passages):
        largest, at = blocks.largest(blocks.similarities(queries, *of_block))
        return None, (_scores(largest, query_mask, of_block[1]), at)

    given = blocks.split(num_blocks, passages, passage_mask)
    scores, chosen = jax.lax.scan(block, None, given)[1]
    return blocks.join(scores, passages.shape[0]), chosen


def _scores(largest: jax.Array, query_mask: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns scores [Q, b]: the sums of the maxima [Q, Lq, b] over query tokens."""
    scores = jnp.where(query_mask[:, :, None], largest, 0.0).sum(1)
    return jnp.where(mask.any(1)[None], scores, EMPTY_PASSAGE)
