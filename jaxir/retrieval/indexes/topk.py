"""Finds the k best of many scores, exactly and with ordered ties, on every device of a mesh.

A block of scores [Q, M] is scanned in two passes: first for the best score of each group of 32, then for all
scores of the groups whose best may be among the k best. This is exact and reads most of the block once. After
the first blocks, the second pass reads few groups; the program decides from the scores how many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxir.runtime.program_store import ProgramStore, StoredFunction

NO_RANK = np.iinfo(np.int32).max
# Adding this to a rank gives the bits of a normal float32, and such floats sort like ranks.
FIRST_NORMAL = 0x00800000
MAX_COUNT = 0x7F7FFFFF - FIRST_NORMAL  # 2.1e9; ranks below this give finite floats
GROUP = 32  # scores in a group
FEW_GROUPS = 4  # least number of groups that the second pass reads
APPROXIMATE_ON = ("tpu",)  # platforms with an approximate top-k; on others, XLA sorts complete rows
# On a CPU, a product with at most this many queries is 1.2 to 2.8 times as fast with vectors as first factor.
FEW_QUERIES = 64


@functools.lru_cache(maxsize=32)
def block_program(
    mesh: Mesh, recall: float | None, total: int, *, columns: bool = False
) -> Callable[..., Any]:
    """Returns a function that merges a block of vectors into the best results so far, on each device.

    It maps (queries [Q, D], vectors [n M, D], multipliers [n M], ranks [n M], scores [n, Q, K], ranks
    [n, Q, K]) to (scores [n, Q, K], ranks [n, Q, K]): each of n devices has M vectors and K results. Scores
    descend; among equal scores, the lowest ranks are taken, in any order. Devices exchange no data.

    Args:
      recall: the wanted recall on a TPU; None: exact.
      total: number of vectors of the index, for `recall`.
      columns: whether vectors come from `rounding.columns_program`, bfloat16 [n D, M].
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
    return _kept(program, mesh, **specs)


@functools.lru_cache(maxsize=32)
def merge_program(mesh: Mesh) -> Callable[..., Any]:
    """Returns a function that merges the results of all devices; each device gets the merged results.

    It maps (scores [n, Q, K], ranks [n, Q, K]) to (scores [Q, K], ranks [Q, K]), in descending order of
    score, then ascending order of rank.
    """
    rows, whole, axes = PartitionSpec(mesh.axis_names), PartitionSpec(), mesh.axis_names

    def program(scores, ranks):
        k = scores.shape[2]
        # `ProgramStore` can only describe closures that hold no functions.
        scores, ranks = (
            jnp.concatenate(list(jax.lax.all_gather(x[0], axes)), axis=1) for x in (scores, ranks)
        )
        negative, ranks = jax.lax.sort((-scores, ranks), num_keys=2)
        return -negative[:, :k], ranks[:, :k]

    # Skip JAX's check of varying axes, which cannot know that an all-gather gives equal results everywhere.
    specs = {"in_specs": (rows, rows), "out_specs": (whole, whole), "check_vma": False}
    return _kept(program, mesh, **specs)


def _kept(program: Callable[..., Any], mesh: Mesh, **specs: Any) -> Callable[..., Any]:
    """Compiles a function of arrays on a mesh; on one device, later processes load its programs."""
    jitted = jax.jit(jax.shard_map(program, mesh=mesh, **specs))
    if mesh.size > 1:
        return jitted
    store = ProgramStore(program, mesh, specs, modules=(), devices=list(mesh.devices.flat))
    return StoredFunction(jitted, store, num_results=2)


def _products(queries: jax.Array, vectors: jax.Array, *, cpu: bool) -> jax.Array:
    """Returns float32 inner products [Q, M] of queries [Q, D] and stored vectors [M, D].

    For bfloat16 and int8 vectors, inner products are float32 sums of exact products with bfloat16 queries.
    """
    if vectors.dtype != jnp.float32 and cpu:  # without `columns`, bfloat16 products are slow on a CPU
        queries, vectors = rounded(queries), vectors.astype(jnp.float32)
    elif vectors.dtype != jnp.float32:
        queries, vectors = queries.astype(jnp.bfloat16), vectors.astype(jnp.bfloat16)
    if cpu and len(queries) <= FEW_QUERIES:
        return _dot(vectors, queries.T).T
    return _dot(queries, vectors.T)


def rounded(x: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16 precision, as float32. XLA might remove a pair of conversions instead."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # Use HIGHEST: accelerators' default precision (bfloat16, TF32) would reorder near neighbours.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _scores(products: jax.Array, multipliers: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns scores, -inf for padding. Adding 0.0 turns -0.0, which would rank below 0.0, into 0.0."""
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
    """Merges products [Q, M], with multipliers and ranks [M], into the best scores and ranks so far, [Q, K].

    Scores are not stored, but computed where they are used, at most twice.
    """
    (count, size), k = products.shape, best_scores.shape[1]
    width = min(GROUP, size)
    groups = size // width
    # Possible numbers of groups to read, doubled until the k best fit (without ties). Reading more than a
    # quarter of the groups saves nothing.
    rooms = [r for r in (FEW_GROUPS << n for n in range(16)) if r <= groups // 4 and r // 2 < k]
    if not cpu:  # keep few: a TPU's compiler takes many seconds for each
        rooms = rooms[-1:]
    grouped = products.reshape(count, width, groups)
    of_groups = multipliers.reshape(width, groups), ranks.reshape(width, groups)
    # Loop over the members of a group, because XLA does not fuse the sum in `_scores` with a maximum over an
    # axis.
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
        """Returns the most groups of any query that have a score of at least `cut`, the k-th best."""
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
    """Like `_take`, but by `jax.lax.approx_max_k`, with the wanted recall among all `total` vectors."""
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
    """Returns the k best scores [Q, K], descending, and their ranks; of equal scores, the lowest ranks.

    Args:
      scores: [Q, C], C >= k.
      ranks: [Q, C], or [C] for all queries, int32, below `MAX_COUNT`, or NO_RANK with a score of -inf.
    """

    def ranks_at(at):
        return ranks[at] if ranks.ndim == 1 else jnp.take_along_axis(ranks, at, axis=1)

    values, at = _top_k(scores, k)
    last = values[:, -1:]
    found = ranks_at(at)

    def lowest_ranks_of_the_last():
        # Ranks become floats: on a CPU, XLA's top-k is fast for floats, but sorts complete rows of integers.
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
    """`jax.lax.top_k` with barriers, or else XLA on a CPU turns a slice of its result into a full sort."""
    values, at = jax.lax.top_k(scores, k)
    # Two barriers: if XLA turns the top-k into a sort, it aborts at a single barrier for both results.
    return jax.lax.optimization_barrier(values), jax.lax.optimization_barrier(at)
