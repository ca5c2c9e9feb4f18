"""Similarities of tokens, a block of passages at a time: what MaxSim and XTR share.

A device compares its queries with a block of passages at a time. For the gradient the device keeps which
passage token each query token chose, and makes the slopes of each block again from these choices.

On a mesh, passages go round a ring of the devices that split the batch, so that no device holds all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxir.losses import _ring
from jaxir.losses._ring import Ring

Passages = tuple[jax.Array, jax.Array]  # vectors [P, Lp, D] and mask [P, Lp]

EMPTY_PASSAGE = -1e9  # score of a passage without tokens, below all others, as in sentence-transformers
_BLOCK_SIMILARITIES = 1 << 22  # default number of similarities in a block on a device: 16 MiB in float32


def ring_of(queries: jax.Array, passages: jax.Array) -> Ring | None:
    """Returns the ring of devices that split queries and passages; None if no ring splits both."""
    rings = {_ring.ring_for(len(side)) for side in (queries, passages)}
    return rings.pop() if len(rings) == 1 else None


def num_blocks(total: int, each: int, block_size: int | None) -> int:
    """Returns the number of blocks of `total` passages; one passage has `each` similarities."""
    return -(-total // min(total, block_size or max(1, _BLOCK_SIMILARITIES // each)))


def around(ring: Ring | None, compare: Callable[..., Any], queries, query_mask, passages, passage_mask):
    """Compares the queries with all passages by `compare`, which returns scores and what to save.

    On a mesh queries stay on their device, and passages go round the ring: at step k device d has the
    passages of device d + k. The saved values of all steps are stacked along a new first axis, which the
    devices split.
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

    return on_devices(ring, on_device)(queries, query_mask, passages, passage_mask)


def on_devices(ring: Ring, function: Callable[..., Any]) -> Callable[..., Any]:
    split = PartitionSpec(ring.axes)
    return jax.shard_map(function, mesh=ring.mesh, in_specs=split, out_specs=split, check_vma=False)


def backward(num_blocks, ring, saved, gradient):
    """Returns the gradients of (queries, query_mask, passages, passage_mask), given that of scores [Q, P].

    `saved` ends with the chosen tokens [N, Q, Lq, b] of N blocks of b passages. Each is a token's number in
    its passage, or the passage's length if no token was chosen. On a mesh the shape is [devices, steps, N, Q,
    Lq, b].
    """
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

    of_queries, of_passages = on_devices(ring, on_device)(*saved, gradient)
    return of_queries, None, of_passages, None


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

    blocks = (*split(num_blocks, passages, passage_mask), chosen, *split(num_blocks, gradient.T))
    of_queries, of_passages = jax.lax.scan(block, jnp.zeros_like(queries), blocks)
    return of_queries, of_passages.reshape(-1, *passages.shape[1:])[: passages.shape[0]]


def similarities(queries: jax.Array, passages: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the similarities of tokens [Q, Lq, b, Lp], -inf for masked tokens of passages."""
    found = jnp.einsum("qsd,ptd->qspt", queries, passages, precision="highest")
    return jnp.where(mask[None, None], found, -jnp.inf)


def largest(found: jax.Array, *, spare: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns the maxima [Q, Lq, b] of similarities [Q, Lq, b, Lp] over Lp, and the tokens' numbers.

    The type of the numbers also holds `spare` further numbers, from Lp on.
    """
    top, length = found.max(3), found.shape[3]
    # Use two reductions, which vectorise; on a CPU `argmax` takes several times as long.
    at = jnp.where(found == top[..., None], _places(length, jnp.int32), length).min(3)
    return top, at.astype(_choice_type(length + spare))


def split(num_blocks: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Splits arrays [P, ...] into blocks [N, b, ...] of equal size; the last one ends with zeros."""

    def of_one(x: jax.Array) -> jax.Array:
        size = -(-x.shape[0] // num_blocks)
        x = jnp.pad(x, [(0, num_blocks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(num_blocks, size, *x.shape[1:])

    return tuple(map(of_one, arrays))


def join(scores: jax.Array, total: int) -> jax.Array:
    """Joins the blocks' scores [N, Q, b] to [Q, P], P being `total`."""
    return scores.swapaxes(0, 1).reshape(scores.shape[1], -1)[:, :total]


def _places(length: int, dtype: Any) -> jax.Array:
    """Returns 0 to `length` - 1, [1, 1, 1, Lp]."""
    return jnp.arange(length, dtype=dtype)[None, None, None]


def _choice_type(count: int) -> jnp.dtype:
    """Returns the smallest type that holds 0 to `count` - 1."""
    return jnp.dtype("uint8" if count <= 1 << 8 else "uint16" if count <= 1 << 16 else "int32")
