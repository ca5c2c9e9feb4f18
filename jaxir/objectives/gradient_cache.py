"""Gradient caching: embeddings of a batch of any size in the memory of one chunk (Gao et al. 2021).

The batch is embedded in chunks that keep only their embeddings. The loss gives the gradient of each
embedding; each chunk is then embedded again, with the same random numbers, to pass its gradients on to the
parameters. The gradients equal those of the whole batch. The price is a second forward pass, or 4/3 of the
direct step if a backward pass costs two forward ones. It is implemented as a scan over rematerialised chunks.
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
    """Returns the objective with its chunks, and those of its parts, reduced to divisors of `rows`."""
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
    """Embeds a batch chunk by chunk; its gradient keeps the activations of one chunk at a time.

    Chunk c holds the rows i with i mod `chunks` = c: a share of every device's rows, so that all devices work
    on every chunk and no row moves.

    Args:
      embed: (part of the batch, key) -> arrays with one row for each row of the part: embeddings, or anything
        else that is computed row by row, such as the losses of tokens.
      batch: arrays [B, ...].
      key: a key or a tuple of keys, each split into one for each chunk; None: nothing is random.
      chunks: the number of chunks, which must divide B; 1 calls `embed` itself.

    Returns:
      The arrays of `embed`, with B rows in the order of the batch.

    Raises:
      UserError: `chunks` does not divide B.
    """
    if chunks == "auto":
        raise ValueError('chunks="auto" is replaced by a number by the training loop only: give a number')
    if chunks == 1:
        return embed(batch, key)
    rows = len(next(iter(batch.values())))
    if rows % chunks:
        raise UserError(f"a batch of {rows} examples cannot be embedded in {chunks} equal chunks")

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
