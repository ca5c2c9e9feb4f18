"""The k best of many scores, exactly and with their ties, on every device of a mesh.

A block of scores [Q, M] is looked through in two passes: the best score of each group of 32 first, then the
groups whose best may be among the k best. That is exact, and reads most of the block once. Once the first
blocks are past few groups need to be opened; how many, the scores decide while the program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

NO_RANK = np.iinfo(np.int32).max
# Added to a rank it makes the bits of a normal float32, of the same order as the ranks.
FIRST_NORMAL = 0x00800000
MAX_COUNT = 0x7F7FFFFF - FIRST_NORMAL  # ranks that stay finite so: 2.1e9
GROUP = 32
FEW_GROUPS = 4
# Where XLA has an approximate top-k; elsewhere it sorts whole rows instead.
APPROXIMATE_ON = ("tpu",)
# On a CPU the product with no more queries is quicker with the vectors on its left, 1.2 to 2.8 times.
FEW_QUERIES = 64


@functools.lru_cache(maxsize=32)
def block_program(
    mesh: Mesh, recall: float | None, total: int, *, columns: bool = False
) -> Callable[..., Any]:
    """Returns the program that takes a block of vectors into the best answers so far, on each device.

    It is (queries [Q, D], vectors [n M, D], multipliers [n M], ranks [n M], scores [n, Q, K], ranks
    [n, Q, K]) -> (scores [n, Q, K], ranks [n, Q, K]): n devices have M vectors and K answers each. Answers
    are by descending score; among equal scores those of lowest rank are taken, in any order. Nothing travels
    between devices.

    Args:
      recall: what share of the true answers is wanted, on a TPU; None is all.
      total: vectors of the whole index, for `recall`.
      columns: vectors come as `rounding.columns_program` makes them, [n D, M] in bfloat16.
    """
    rows, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    platform = mesh.devices.flat[0].platform
    approximate = recall is not None and platform in APPROXIMATE_ON

    def program(queries, vectors, multipliers, ranks, best_scores, best_ranks):
        if columns:
            products = _dot(queries.astype(jnp.bfloat16), vectors)
        else:
            products = _products(queries, vectors, cpu=platform == "cpu")
        best = best_scores[0], best_ranks[0]
        if approximate:
            found = _take_approximately(products, multipliers, ranks, *best, recall=recall, total=total)
        else:
            found = _take(products, multipliers, ranks, *best, cpu=platform == "cpu")
        return found[0][None], found[1][None]

    specs = {"in_specs": (whole, rows, rows, rows, rows, rows), "out_specs": (rows, rows)}
    return jax.jit(jax.shard_map(program, mesh=mesh, **specs))


@functools.lru_cache(maxsize=32)
def merge_program(mesh: Mesh) -> Callable[..., Any]:
    """Returns the program that makes one list of answers of those of all devices, for each to have.

    It is (scores [n, Q, K], ranks [n, Q, K]) -> (scores [Q, K], ranks [Q, K]), by descending score, then
    ascending rank.
    """
    rows, whole = PartitionSpec(mesh.axis_names), PartitionSpec()

    def together(x):
        return jnp.concatenate(list(jax.lax.all_gather(x[0], mesh.axis_names)), axis=1)

    def program(scores, ranks):
        k = scores.shape[2]
        negative, ranks = jax.lax.sort((-together(scores), together(ranks)), num_keys=2)
        return -negative[:, :k], ranks[:, :k]

    # That all devices compute the same is more than the check of varying axes can know of an all-gather.
    specs = {"in_specs": (rows, rows), "out_specs": (whole, whole), "check_vma": False}
    return jax.jit(jax.shard_map(program, mesh=mesh, **specs))


def _products(queries: jax.Array, vectors: jax.Array, *, cpu: bool) -> jax.Array:
    """Returns float32 inner products [Q, M] of queries [Q, D] and vectors [M, D] as they are stored.

    Of bfloat16 and int8 vectors they are sums in float32 of products with bfloat16 queries, which are exact.
    """
    if vectors.dtype != jnp.float32 and cpu:  # where other types are quick in `columns` only, and not on all
        queries, vectors = rounded(queries), vectors.astype(jnp.float32)
    elif vectors.dtype != jnp.float32:
        queries, vectors = queries.astype(jnp.bfloat16), vectors.astype(jnp.bfloat16)
    if cpu and len(queries) <= FEW_QUERIES:
        return _dot(vectors, queries.T).T
    return _dot(queries, vectors.T)


def rounded(x: jax.Array) -> jax.Array:
    """Returns float32 numbers rounded to bfloat16, as float32; XLA may leave out two conversions for that."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # The default precision of accelerators (bfloat16, TF32) would reorder near neighbours.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _scores(products: jax.Array, multipliers: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns scores, those of padding -inf; -0.0, which would rank below 0.0, becomes 0.0 by the sum."""
    return products * multipliers + jnp.where(ranks == NO_RANK, -jnp.inf, 0.0)


def _take(
    products: jax.Array,
    multipliers: jax.Array,
    ranks: jax.Array,
    best_scores: jax.Array,
    best_ranks: jax.Array,
    *,
    cpu: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Takes products [Q, M], with multipliers and ranks [M], into the best so far, [Q, K] each, best first.

    Scores are made where they are looked at, twice at most, rather than written and read again.
    """
    (count, size), k = products.shape, best_scores.shape[1]
    width = min(GROUP, size)
    groups = size // width
    # Doubled until the k best have room, but for ties; beyond a quarter of the groups nothing is gained.
    rooms = [r for r in (FEW_GROUPS << n for n in range(16)) if r <= groups // 4 and r // 2 < k]
    if not cpu:  # a TPU's compiler takes many seconds for each
        rooms = rooms[-1:]
    grouped = products.reshape(count, width, groups)
    of_groups = multipliers.reshape(width, groups), ranks.reshape(width, groups)
    # Member after member, for XLA fuses no sum of its own with a maximum over an axis.
    members = (_scores(grouped[:, i], *(x[None, i] for x in of_groups)) for i in range(width))
    maxima = functools.reduce(jnp.maximum, members)

    def join(scores, ranks):
        scores = jnp.concatenate([best_scores, scores], axis=1)
        return best(scores, jnp.concatenate([best_ranks, ranks], axis=1), k)

    def everything():
        return join(*best(_scores(products, multipliers[None, :], ranks[None, :]), ranks, min(k, size)))

    def open_groups(room):
        values, chosen = _top_k(maxima, room)
        found = jnp.take_along_axis(grouped, chosen[:, None, :], axis=2)
        multipliers, ranks = (jnp.moveaxis(jnp.take(x, chosen, axis=1), 0, 1) for x in of_groups)
        found = _scores(found, multipliers, ranks).reshape(count, -1)
        taken = functools.partial(join, found, ranks.reshape(count, -1))
        if room < k:
            return taken()
        return jax.lax.cond(needed(values[:, -1:]) <= room, taken, everything)

    def needed(cut):
        """Returns how many groups of a query, at most, may hold one of its k best, `cut` being the last."""
        cut = jnp.maximum(cut, best_scores[:, -1:])
        return jnp.max(jnp.sum((maxima >= cut) & (maxima > -jnp.inf), axis=1))

    if not rooms:
        return everything()
    enough = [functools.partial(open_groups, room) for room in rooms]
    if rooms[-1] < k:
        enough.append(everything)
    at = jnp.sum(needed(-jnp.inf) > jnp.array(rooms), dtype=jnp.int32)
    return jax.lax.switch(jnp.minimum(at, len(enough) - 1), enough)


def _take_approximately(
    products: jax.Array,
    multipliers: jax.Array,
    ranks: jax.Array,
    best_scores: jax.Array,
    best_ranks: jax.Array,
    *,
    recall: float,
    total: int,
) -> tuple[jax.Array, jax.Array]:
    """As `_take`, by `jax.lax.approx_max_k`; the wanted recall is that among all `total` vectors."""
    k = best_scores.shape[1]
    found, at = jax.lax.approx_max_k(
        _scores(products, multipliers[None, :], ranks[None, :]),
        min(k, len(ranks)),
        recall_target=recall,
        reduction_input_size_override=total if total > len(ranks) else -1,
    )
    scores = jnp.concatenate([best_scores, found], axis=1)
    return best(scores, jnp.concatenate([best_ranks, ranks[at]], axis=1), k)


def best(scores: jax.Array, ranks: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k best scores and their ranks; among equal scores the lowest ranks are taken.

    Args:
      scores: [Q, C], C >= k.
      ranks: [Q, C], or [C] for all queries, int32, below `MAX_COUNT`, or NO_RANK with a score of -inf.

    Returns:
      (descending scores [Q, K], ranks [Q, K] in any order among equal scores).
    """

    def ranks_at(at):
        return ranks[at] if ranks.ndim == 1 else jnp.take_along_axis(ranks, at, axis=1)

    values, at = _top_k(scores, k)
    last = values[:, -1:]
    found = ranks_at(at)

    def lowest_ranks_of_the_last():
        # XLA sorts whole rows of integers, while its top-k of floats is quick on a CPU.
        keys = jax.lax.bitcast_convert_type(jnp.minimum(ranks, MAX_COUNT) + FIRST_NORMAL, jnp.float32)
        keys = jnp.broadcast_to(keys, scores.shape)
        _, at = _top_k(jnp.where(scores == last, -keys, -jnp.inf), k)
        above = jnp.sum(values > last, axis=1, keepdims=True)
        places = jnp.arange(k)[None, :] - above
        tied = jnp.take_along_axis(ranks_at(at), jnp.maximum(places, 0), axis=1)
        return jnp.where(places < 0, found, tied)

    left_out = (jnp.sum(scores >= last, axis=1) > k) & (last[:, 0] > -jnp.inf)
    return values, jax.lax.cond(jnp.any(left_out), lowest_ranks_of_the_last, lambda: found)


def _top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k`, kept apart from what uses it: XLA for CPUs makes a slice of it the slice of a sort."""
    values, at = jax.lax.top_k(scores, k)
    # One by one: XLA aborts over a barrier for the two of them where it makes a sort of the top-k.
    return jax.lax.optimization_barrier(values), jax.lax.optimization_barrier(at)
