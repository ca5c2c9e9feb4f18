"""Exact search by rounded products, on CPUs that multiply bfloat16 numbers twice as quickly as float32.

All vectors are compared in bfloat16, and somewhat more answers kept than are asked for; these are compared
again in float32. How far rounding can have moved a score is bounded, so it is known of each query whether a
vector that was left out could have been among its answers; the few queries of which that cannot be excluded
are compared with everything in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxir.retrieval.indexes.topk import rounded

# Queries at once from which converting the vectors costs less than the quicker products save.
LEAST_QUERIES = 256
# Beyond as many answers, comparing them again costs more.
MOST_ANSWERS = 300
# Answers that are kept beyond the k asked for: k / 4 + 12. Of 204,000 real vectors at most 8 (k = 10), 32
# (100) and 152 (1000) more were needed for any of 1,000 queries.
MORE_SHARE, MORE = 4, 12
# The share of an index's queries of which nothing could be said, above which rounding is not tried again.
TOO_MANY = 0.25


@functools.lru_cache(maxsize=32)
def columns_program(mesh: Mesh) -> Callable[..., Any]:
    """Returns the program (vectors [n M, D] of any type) -> [n D, M], each device's own, in bfloat16.

    XLA multiplies bfloat16 numbers quickly where the second factor is contracted over its rows only.
    """
    rows = PartitionSpec(mesh.axis_names)

    def program(vectors):
        return jax.lax.optimization_barrier(vectors.T).astype(jnp.bfloat16)

    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=rows, out_specs=rows))


@functools.lru_cache(maxsize=32)
def lengths_program(mesh: Mesh) -> Callable[..., Any]:
    """Returns the program (float32 vectors [n M, D], multipliers [n M]) -> [n, 2], the greatest lengths.

    They are, each times its multiplier, of a vector and of what rounding it to bfloat16 takes away.
    """
    rows = PartitionSpec(mesh.axis_names)

    def program(vectors, multipliers):
        lost = vectors - rounded(vectors)
        squares = jnp.stack([jnp.sum(x * x, axis=1) for x in (vectors, lost)], axis=1)
        return jnp.max(jnp.sqrt(squares) * multipliers[:, None], axis=0, keepdims=True)

    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=rows, out_specs=rows))


def with_more(k: int) -> int:
    """Returns how many answers are kept where k are asked for."""
    return k + k // MORE_SHARE + MORE


def greatest_errors(queries: np.ndarray, length: float, lost: float) -> np.ndarray:
    """Returns how far, at most, a score of each query by bfloat16 products is from one by float32, [Q].

    By Cauchy and Schwarz: |q . v - q' . v'| <= |q - q'| |v| + |q'| |v - v'|, and sums of D products in
    float32 are each within D 2^-24 |q| |v| of the true one.

    Args:
      queries: [Q, D].
      length: the greatest length of a vector, times its multiplier.
      lost: that of what rounding takes away.
    """
    near = queries.astype(ml_dtypes.bfloat16).astype(np.float32)
    of_query, of_near, of_lost = (np.linalg.norm(x, axis=1) for x in (queries, near, queries - near))
    sums = 2 * (queries.shape[1] + 8) * 2.0**-24 * np.maximum(of_query, of_near) * length
    return of_lost * length + of_near * lost + sums
