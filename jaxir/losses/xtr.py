"""XTR's scores, for training (Lee et al. 2023, arXiv:2304.01982): only retrieved passage tokens count.

One sweep over blocks of passages keeps each query token's largest similarity with each passage, its passage
token, and the `top_k` largest similarities so far. Only after the last block is it known which tokens were
retrieved. The similarities of all tokens, [Q, P, Lq, Lp], never exist at once, and each product is computed
once.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count
from jaxir.losses import _token_blocks as blocks
from jaxir.losses._types import Embedded, TokenVectors


@checked_shapes
def xtr(
    queries: Float32[Array, "Q Lq D"],
    query_mask: Bool[Array, "Q Lq"],
    passages: Float32[Array, "P Lp D"],
    passage_mask: Bool[Array, "P Lp"],
    *,
    top_k: Count = 256,
    block_size: Count | None = None,
) -> Float32[Array, "Q P"]:
    """Scores passages by the tokens that each query token retrieves among all passages of the batch.

    A query token retrieves the `top_k` tokens of all P passages with the largest dot products. A passage's
    score is the sum over query tokens of the largest product with a retrieved token of the passage, divided
    by Z, the number of query tokens that retrieved one (Lee et al. 2023, eq. 5). Other products count as 0.
    The values and gradients are those of sentence-transformers 6.2, except that tokens which are exactly as
    near as the last retrieved one are retrieved, too.

    Args:
      queries: [Q, Lq, D] token vectors.
      query_mask: [Q, Lq], true at tokens to score.
      passages: [P, Lp, D].
      passage_mask: [P, Lp].
      top_k: number of passage tokens that a query token retrieves.
      block_size: number of passages that are compared at once with all queries, as in `maxsim`; None: as many
        as give blocks of 16 MiB, and at least `top_k` tokens.

    Returns:
      scores [Q, P]; 0 for passages of which nothing is retrieved, -1e9 for passages without tokens.

    Raises:
      UserError: top_k or block_size is not positive.
    """
    for name, value in {"top_k": top_k, "block_size": block_size}.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    ring = blocks.ring_of(queries, passages)
    shards = 1 if ring is None else ring.size
    (rows, query_length), (total, length) = query_mask.shape, passage_mask.shape
    empty = ~passage_mask.any(1)[None]
    if not total * length * rows * query_length:
        return jnp.where(empty, blocks.EMPTY_PASSAGE, jnp.zeros((rows, total), jnp.float32))
    top_k, each = min(top_k, total * length), rows // shards * query_length * length
    num_blocks = blocks.num_blocks(total // shards, each, block_size)
    if block_size is None:  # a block much smaller than top_k spends its time on merging the best similarities
        num_blocks = min(num_blocks, -(-total // shards // -(-top_k // length)))
    sums, counts = _retrieved(top_k, num_blocks, ring, queries, query_mask, passages, passage_mask)
    return jnp.where(empty, blocks.EMPTY_PASSAGE, sums / jnp.maximum(counts, 1.0))


def check_xtr_k(query: Embedded, xtr_k: int | None) -> None:
    """Raises a UserError if `xtr_k` is given for vectors of texts."""
    if xtr_k is not None and not isinstance(query, TokenVectors):
        raise UserError("xtr_k is for multi-vector encoders: leave it out for a model with one vector a text")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _retrieved(top_k, num_blocks, ring, queries, query_mask, passages, passage_mask):
    """Returns the sums of retrieved similarities, and how many query tokens retrieved one, both [Q, P]."""
    return _forward(top_k, num_blocks, ring, queries, query_mask, passages, passage_mask)[0]


def _forward(top_k, num_blocks, ring, queries, query_mask, passages, passage_mask):
    compare = functools.partial(_with_choices, top_k, num_blocks, ring)
    saved = queries, query_mask, passages, passage_mask
    if ring is None:
        sums, counts, chosen = compare(*saved)
    else:
        sums, counts, chosen = blocks.on_devices(ring, compare)(*saved)
    return (sums, counts), (*saved, chosen[0] if ring is None else chosen)


def _backward(top_k, num_blocks, ring, saved, gradients):
    return blocks.backward(num_blocks, ring, saved, gradients[0])


_retrieved.defvjp(_forward, _backward)


def _with_choices(top_k, num_blocks, ring, queries, query_mask, passages, passage_mask):
    """Returns the results of `_retrieved`, and the chosen tokens in the form that `blocks.backward` takes.

    On a mesh this function runs on each device, and passages go round the ring, as in `blocks.around`.
    """
    steps, total, length = 1 if ring is None else ring.size, *passage_mask.shape

    def block(best, of_block: blocks.Passages):
        found = blocks.similarities(queries, *of_block)
        every = jnp.concatenate([best, found.reshape(*found.shape[:2], -1)], axis=2)
        return jax.lax.top_k(every, top_k)[0], blocks.largest(found, spare=1)

    def step(carry, _):
        shard, best = carry
        best, found = jax.lax.scan(block, best, blocks.split(num_blocks, *shard))
        return (shard if ring is None else ring.pass_on(shard, -1), best), found

    start = (passages, passage_mask), jnp.full((*query_mask.shape, top_k), -jnp.inf)
    (_, best), (largest, chosen) = jax.lax.scan(step, start, None, length=steps)  # [steps, N, Q, Lq, b]
    kept = query_mask[None, None, ..., None] & (largest >= best[None, None, ..., -1:]) & jnp.isfinite(largest)

    def joined(x):  # [steps, N, Q, b] -> [Q, P]
        x = jax.vmap(lambda of_step: blocks.join(of_step, total))(x)
        if ring is not None:
            x = jnp.roll(x, jax.lax.axis_index(ring.axes), axis=0)
        return x.swapaxes(0, 1).reshape(len(queries), -1)

    sums = joined(jnp.where(kept, largest, 0.0).sum(3))
    counts = joined(kept.sum(3, dtype=jnp.float32))
    chosen = jnp.where(kept, chosen, length).astype(chosen.dtype)
    return sums, counts, chosen if ring is None else chosen[None]
