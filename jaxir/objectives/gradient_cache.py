"""Gradient caching: embeddings of a batch of any size in the memory of one chunk (Gao et al. 2021).

A contrastive loss needs the embeddings of the whole batch, but an encoder needs the activations of only those
rows that it differentiates. So the batch is embedded in chunks that keep nothing but their embeddings, the
loss gives the gradient of each embedding, and each chunk is embedded once more, with the same random numbers,
to take its share of that gradient to the parameters. The gradients are those of the batch in one piece; the
price is a second forward pass, 4/3 of the direct step where a backward pass costs two forward ones.

Here that is a scan over rematerialised chunks: what JAX's automatic differentiation makes of it is the above.
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
Embed = Callable[[Mapping[str, jax.Array], Any], Any]


def with_fitting_chunks(objective: T, rows: int) -> T:
    """Returns an objective with chunks, of it and of its parts, that divide the rows of a device."""
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
    embed: Embed, batch: Mapping[str, jax.Array], key: Any, *, chunks: int | Literal["auto"]
) -> Any:
    """Embeds a batch chunk by chunk; differentiated, it keeps the activations of one chunk at a time.

    Chunk c holds the rows i with i mod `chunks` = c: a share of every device's rows, so that all devices work
    on every chunk and no row moves.

    Args:
      embed: (part of the batch, key) -> arrays whose leading axis is that of the part's rows; embeddings, or
        whatever else each row has of its own, such as the losses of its tokens.
      batch: arrays [B, ...].
      key: a key or a tuple of keys, each split into one for each chunk; None where nothing is random.
      chunks: how many; it must divide B. With 1 this is `embed` itself.

    Returns:
      What `embed` returns, with B rows in the order of the batch.

    Raises:
      UserError: `chunks` does not divide B.
    """
    if chunks == "auto":
        raise ValueError('chunks="auto" is the training loop\'s to choose: give a number')
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

    @jax.checkpoint
    def one(part: Mapping[str, jax.Array], key: Any) -> Any:
        return embed(part, key)

    pieces = {name: split(x) for name, x in batch.items()}
    _, parts = jax.lax.scan(lambda _, piece: (None, one(*piece)), None, (pieces, keys))
    return jax.tree.map(join, parts)
