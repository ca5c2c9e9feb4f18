"""MaxSim, the late interaction of ColBERT (Khattab and Zaharia 2020, arXiv 2004.12832), block by block.

The similarities of all tokens, [Q, P, Lq, Lp], never exist at once: a scan over blocks of passages reduces
each block to its maxima. For the gradient it stores which passage token each query token chose, in one or two
bytes each. The backward scan makes the slopes of each block again from these choices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count

EMPTY_PASSAGE = -1e9  # score of a passage without tokens, below all others, as in sentence-transformers
_BLOCK_SIMILARITIES = 1 << 22  # similarities of a block, by default: 16 MiB in float32

_Passages = tuple[jax.Array, jax.Array]  # vectors [P, Lp, D] and mask [P, Lp]


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
    total, each = passages.shape[0], queries.shape[0] * queries.shape[1] * passages.shape[1]
    if not total * each:
        empty = ~passage_mask.any(1)[None]
        return jnp.where(empty, EMPTY_PASSAGE, jnp.zeros((queries.shape[0], total), jnp.float32))
    size = min(total, block_size or max(1, _BLOCK_SIMILARITIES // each))
    return _blockwise(-(-total // size), queries, query_mask, passages, passage_mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(num_blocks, queries, query_mask, passages, passage_mask):
    def block(_, of_block: _Passages):
        return None, _scores(_similarities(queries, *of_block).max(3), query_mask, of_block[1])

    blocks = _split(num_blocks, passages), _split(num_blocks, passage_mask)
    return _join(jax.lax.scan(block, None, blocks)[1], passages.shape[0])


def _forward(num_blocks, queries, query_mask, passages, passage_mask):
    def block(_, of_block: _Passages):
        found = _similarities(queries, *of_block)
        largest, length = found.max(3), found.shape[3]
        # Two reductions that vectorise; on a CPU `argmax` takes several times as long.
        at = jnp.where(found == largest[..., None], _places(length, jnp.int32), length).min(3)
        return None, (_scores(largest, query_mask, of_block[1]), at.astype(_choice_type(length)))

    blocks = _split(num_blocks, passages), _split(num_blocks, passage_mask)
    scores, chosen = jax.lax.scan(block, None, blocks)[1]
    return _join(scores, passages.shape[0]), (queries, query_mask, passages, passage_mask, chosen)


def _backward(num_blocks, saved, gradient):
    queries, query_mask, passages, passage_mask, chosen = saved

    def block(of_queries, of_block):
        vectors, mask, at, slope = of_block
        slope = jnp.where(mask.any(1)[None], slope.T, 0.0)  # [Q, b]
        slope = jnp.where(query_mask[:, :, None], slope[:, None, :], 0.0)  # [Q, Lq, b]
        is_chosen = at[..., None] == _places(vectors.shape[1], at.dtype)
        slopes = jnp.where(is_chosen, slope[..., None], 0.0)  # [Q, Lq, b, Lp]
        of_queries += jnp.einsum("qspt,ptd->qsd", slopes, vectors, precision="highest")
        return of_queries, jnp.einsum("qspt,qsd->ptd", slopes, queries, precision="highest")

    blocks = (_split(num_blocks, passages), _split(num_blocks, passage_mask), chosen)
    blocks = (*blocks, _split(num_blocks, gradient.T))
    of_queries, of_passages = jax.lax.scan(block, jnp.zeros_like(queries), blocks)
    of_passages = of_passages.reshape(-1, *passages.shape[1:])[: passages.shape[0]]
    return of_queries, None, of_passages, None


_blockwise.defvjp(_forward, _backward)


def _similarities(queries: jax.Array, passages: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the similarities of tokens [Q, Lq, b, Lp], -inf for masked tokens of passages."""
    found = jnp.einsum("qsd,ptd->qspt", queries, passages, precision="highest")
    return jnp.where(mask[None, None], found, -jnp.inf)


def _scores(largest: jax.Array, query_mask: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the scores [Q, b] of the maxima [Q, Lq, b]."""
    scores = jnp.where(query_mask[:, :, None], largest, 0.0).sum(1)
    return jnp.where(mask.any(1)[None], scores, EMPTY_PASSAGE)


def _split(num_blocks: int, x: jax.Array) -> jax.Array:
    """Splits [P, ...] into blocks [N, b, ...] of equal size; the last one ends with zeros."""
    size = -(-x.shape[0] // num_blocks)
    x = jnp.pad(x, [(0, num_blocks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(num_blocks, size, *x.shape[1:])


def _join(scores: jax.Array, total: int) -> jax.Array:
    """Returns [Q, P] of the blocks' scores [N, Q, b]."""
    return scores.swapaxes(0, 1).reshape(scores.shape[1], -1)[:, :total]


def _places(length: int, dtype: Any) -> jax.Array:
    """Returns 0 to `length` - 1, [1, 1, 1, Lp]."""
    return jnp.arange(length, dtype=dtype)[None, None, None]


def _choice_type(length: int) -> jnp.dtype:
    """Returns the smallest type that numbers `length` tokens."""
    return jnp.dtype("uint8" if length <= 1 << 8 else "uint16" if length <= 1 << 16 else "int32")
