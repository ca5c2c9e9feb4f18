"""Exact search with bfloat16 products, on CPUs that multiply bfloat16 twice as fast as float32.

All vectors are compared in bfloat16, and then somewhat more than the k best again in float32. The
rounding error of a score is bounded. If a vector that was not compared again could be among a query's k
best, that query is compared with all vectors in float32.
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

LEAST_QUERIES = 256  # with fewer queries, converting the vectors costs more than the faster products save
MOST_ANSWERS = 300  # for greater k, comparing again costs more than the faster products save
# k + k / 4 + 12 vectors are compared again. For 1,000 queries and 204,000 real vectors, at most 8 (k = 10),
# 32 (k = 100) and 152 (k = 1000) more were needed.
MORE_SHARE, MORE = 4, 12
TOO_MANY = 0.25  # if a greater share of queries needs all vectors in float32, bfloat16 is not used again


@functools.lru_cache(maxsize=32)
def columns_program(mesh: Mesh) -> Callable[..., Any]:
    """Returns a function that transposes vectors [n M, D] of any type to bfloat16 [n D, M] on n devices.

    XLA multiplies bfloat16 fast only if the second factor is contracted over its rows.
    """
    rows = PartitionSpec(mesh.axis_names)

    def program(vectors):
        return jax.lax.optimization_barrier(vectors.T).astype(jnp.bfloat16)

    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=rows, out_specs=rows))


@functools.lru_cache(maxsize=32)
def lengths_program(mesh: Mesh) -> Callable[..., Any]:
    """Returns a function that maps float32 vectors [n M, D] and multipliers [n M] to maximum lengths [n, 2].

    Each device gives the length of its longest vector and of its greatest bfloat16 error, times multipliers.
    """
    rows = PartitionSpec(mesh.axis_names)

    def program(vectors, multipliers):
        lost = vectors - rounded(vectors)
        squares = jnp.stack([jnp.sum(x * x, axis=1) for x in (vectors, lost)], axis=1)
        return jnp.max(jnp.sqrt(squares) * multipliers[:, None], axis=0, keepdims=True)

    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=rows, out_specs=rows))


def with_more(k: int) -> int:
    return k + k // MORE_SHARE + MORE


def greatest_errors(queries: np.ndarray, length: float, lost: float) -> np.ndarray:
    """Returns the maximum difference [Q] between a query's scores by bfloat16 and by float32 products.

    By Cauchy-Schwarz: |q . v - q' . v'| <= |q - q'| |v| + |q'| |v - v'|, and float32 sums of D products are
    each within D 2^-24 |q| |v| of the true sum. `length` and `lost` are the results of `lengths_program`.
    """
    near = queries.astype(ml_dtypes.bfloat16).astype(np.float32)
    of_query, of_near, of_lost = (np.linalg.norm(x, axis=1) for x in (queries, near, queries - near))
    sums = 2 * (queries.shape[1] + 8) * 2.0**-24 * np.maximum(of_query, of_near) * length
    return of_lost * length + of_near * lost + sums
