"""Gradient caching: embeds a batch of any size with the activation memory of one chunk (Gao et al. 2021).

The batch is embedded chunk by chunk, and only the embeddings are kept. The loss gives the gradient of each
embedding. Each chunk is then embedded again, with the same random numbers, to compute the gradients of the
parameters, which equal the gradients of a direct step. The second forward pass makes a step take up to 4/3 of
the time, if a backward pass costs two forward passes. Implemented as a scan over rematerialised chunks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax

from jaxir.core.errors import UserError
from jaxir.runtime.partitioning import constrain

T = TypeVar("T")


def with_fitting_chunks(objective: T, rows: int) -> T:
    """Reduces `chunks` of an objective, and of objectives in its fields, to divisors of `rows`."""
    changed = {}
    for field in dataclasses.fields(objective) if dataclasses.is_dataclass(objective) else ():
        value = getattr(objective, field.name)
        if field.name == "chunks" and isinstance(value, int):
            changed[field.name] = math.gcd(value, rows)
        elif isinstance(value, Mapping):
            changed[field.name] = {name: with_fitting_chunks(part, rows) for name, part in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed[field.name] = with_fitting_chunks(value, rows)
    return dataclasses.replace(objective, **changed) if changed else objective


def embed_in_chunks(
    embed: Callable[[Mapping[str, jax.Array], Any], Any],
    batch: Mapping[str, jax.Array],
    key: Any,
    *,
    chunks: int | Literal["auto"],
) -> Any:
    """Embeds a batch chunk by chunk, so that its gradient needs the activations of only one chunk at a time.

    Chunk c consists of the rows i with i mod `chunks` = c. Every device then has an equal share of each
    chunk, and no row moves between devices.

    Args:
      embed: maps (a chunk of the batch, key) to arrays with one row for each row of the chunk: embeddings, or
        anything else that is computed row by row, such as the losses of tokens.
      batch: arrays [B, ...].
      key: a random key or a tuple of keys, each of which is split over the chunks; None: nothing is random.
      chunks: the number of chunks, which must divide B; 1 calls `embed` itself.

    Returns:
      The arrays of `embed`, with B rows in the order of the batch.

    Raises:
      UserError: `chunks` does not divide B.
    """
    if chunks == "auto":
        raise ValueError('chunks="auto" only works in a training run (jaxir.train): give a number of chunks')
    if chunks == 1:
        return embed(batch, key)
    rows = len(next(iter(batch.values())))
    if rows % chunks:
        raise UserError(
            f"a batch of {rows} examples cannot be embedded in {chunks} equal chunks: set chunks to a divisor"
            " of the batch size"
        )

    def split(x: jax.Array) -> jax.Array:
        parts = x.reshape(rows // chunks, chunks, *x.shape[1:]).swapaxes(0, 1)
        return constrain(parts, (None, "batch", *[None] * (x.ndim - 1)))

    def join(parts: jax.Array) -> jax.Array:
        x = parts.swapaxes(0, 1).reshape(rows, *parts.shape[2:])
        return constrain(x, ("batch", *[None] * (x.ndim - 1)))

    keys = jax.tree.map(lambda one: jax.random.split(one, chunks), key)
    pieces = {name: split(x) for name, x in batch.items()}
    embed = jax.checkpoint(embed)
    _, parts = jax.lax.scan(lambda _, piece: (None, embed(*piece)), None, (pieces, keys))
    return jax.tree.map(join, parts)
