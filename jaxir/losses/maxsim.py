"""MaxSim, the late interaction of ColBERT (Khattab and Zaharia 2020, arXiv 2004.12832), block by block.

The similarities of all tokens, [Q, P, Lq, Lp], never exist at once: a scan over blocks of passages reduces
each block to its maxima. For the gradient it stores which passage token each query token chose, in one or two
bytes each. The backward scan makes the slopes of each block again from these choices.

On a mesh, passages go round a ring of the devices that split the batch, so that no device holds all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float32

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count
from jaxir.losses import _ring
from jaxir.losses._ring import Ring
from jaxir.losses._types import TokenVectors
from jaxir.runtime import partitioning

EMPTY_PASSAGE = -1e9  # score of a passage without tokens, below all others, as in sentence-transformers
_BLOCK_SIMILARITIES = 1 << 22  # similarities of a block on a device, by default: 16 MiB in float32

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
    rings = {_ring.ring_for(len(side)) for side in (queries, passages)}
    ring = rings.pop() if len(rings) == 1 else None
    shards = 1 if ring is None else ring.size
    total, each = passages.shape[0], queries.shape[0] * queries.shape[1] * passages.shape[1]
    if not total * each:
        empty = ~passage_mask.any(1)[None]
        return jnp.where(empty, EMPTY_PASSAGE, jnp.zeros((queries.shape[0], total), jnp.float32))
    num_blocks = _num_blocks(total // shards, each // shards, block_size)
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
    num_blocks = _num_blocks(mask.shape[1], rows * mask.shape[1] * passage_mask.shape[2], block_size)

    def of_list(vectors, mask, passages, passage_mask):
        return _compared(num_blocks, None, vectors[None], mask[None], passages, passage_mask)[0]

    scores = jax.vmap(of_list)(vectors, mask, passages, passage_mask)
    return scores if queries.weight is None else scores * queries.weight[:, None]


def _num_blocks(total: int, each: int, block_size: int | None) -> int:
    """Returns the number of blocks of `total` passages, which have `each` similarities."""
    return -(-total // min(total, block_size or max(1, _BLOCK_SIMILARITIES // each)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compared(num_blocks, ring, queries, query_mask, passages, passage_mask):
    def scores(*sides):
        return _scores_of_blocks(num_blocks, *sides), None

    return _around(ring, scores, queries, query_mask, passages, passage_mask)[0]


def _forward(num_blocks, ring, queries, query_mask, passages, passage_mask):
    scores = functools.partial(_scores_and_choices, num_blocks)
    saved = queries, query_mask, passages, passage_mask
    found, chosen = _around(ring, scores, *saved)
    return found, (*saved, chosen)


def _backward(num_blocks, ring, saved, gradient):
    slopes = functools.partial(_slopes_of_blocks, num_blocks)
    if ring is None:
        of_queries, of_passages = slopes(*saved, gradient)
        return of_queries, None, of_passages, None

    def on_device(queries, query_mask, passages, passage_mask, chosen, gradient):
        def step(carry, given):
            shard, of_passages, of_queries = carry
            following, arriving = ring.pass_on(shard, -1), ring.pass_on(of_passages, -1)
            more, of_shard = slopes(queries, query_mask, *shard, *given)
            return (following, arriving + of_shard, of_queries + more), None

        parts = gradient.reshape(len(gradient), ring.size, -1).swapaxes(0, 1)
        parts = jnp.roll(parts, -jax.lax.axis_index(ring.axes), axis=0)
        start = (passages, passage_mask), jnp.zeros_like(passages), jnp.zeros_like(queries)
        (_, of_passages, of_queries), _ = jax.lax.scan(step, start, (chosen[0], parts))
        return of_queries, ring.pass_on(of_passages, ring.size - 1)

    of_queries, of_passages = _on_devices(ring, on_device)(*saved, gradient)
    return of_queries, None, of_passages, None


_compared.defvjp(_forward, _backward)


def _around(ring: Ring | None, compare: Callable[..., Any], queries, query_mask, passages, passage_mask):
    """Compares the queries with all passages by `compare`, which returns scores and what to save.

    On a mesh queries stay on their device, and passages go round the ring: at step k device d has those of
    device d + k. What a step saves is stacked, with a first axis that the devices split.
    """
    if ring is None:
        return compare(queries, query_mask, passages, passage_mask)

    def on_device(queries, query_mask, passages, passage_mask):
        def step(shard, _):
            return ring.pass_on(shard, -1), compare(queries, query_mask, *shard)

        shard = passages, passage_mask
        _, (scores, saved) = jax.lax.scan(step, shard, None, length=ring.size)
        scores = jnp.roll(scores, jax.lax.axis_index(ring.axes), axis=0)
        scores = scores.swapaxes(0, 1).reshape(len(queries), -1)
        return scores, jax.tree.map(lambda x: x[None], saved)

    return _on_devices(ring, on_device)(queries, query_mask, passages, passage_mask)


def _on_devices(ring: Ring, function: Callable[..., Any]) -> Callable[..., Any]:
    split = PartitionSpec(ring.axes)
    return jax.shard_map(function, mesh=ring.mesh, in_specs=split, out_specs=split, check_vma=False)


def _scores_of_blocks(num_blocks, queries, query_mask, passages, passage_mask):
    def block(_, of_block: _Passages):
        return None, _scores(_similarities(queries, *of_block).max(3), query_mask, of_block[1])

    blocks = _split(num_blocks, passages), _split(num_blocks, passage_mask)
    return _join(jax.lax.scan(block, None, blocks)[1], passages.shape[0])


def _scores_and_choices(num_blocks, queries, query_mask, passages, passage_mask):
    """Returns scores [Q, P] and the chosen tokens [N, Q, Lq, b] of N blocks of b passages."""

    def block(_, of_block: _Passages):
        found = _similarities(queries, *of_block)
        largest, length = found.max(3), found.shape[3]
        # Two reductions that vectorise; on a CPU `argmax` takes several times as long.
        at = jnp.where(found == largest[..., None], _places(length, jnp.int32), length).min(3)
        return None, (_scores(largest, query_mask, of_block[1]), at.astype(_choice_type(length)))

    blocks = _split(num_blocks, passages), _split(num_blocks, passage_mask)
    scores, chosen = jax.lax.scan(block, None, blocks)[1]
    return _join(scores, passages.shape[0]), chosen


def _slopes_of_blocks(num_blocks, queries, query_mask, passages, passage_mask, chosen, gradient):
    """Returns the gradients of queries and passages, given that of the scores [Q, P]."""

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
    return of_queries, of_passages.reshape(-1, *passages.shape[1:])[: passages.shape[0]]


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
