"""Chooses random tokens of texts, masks tokens, and removes tokens."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Key

from jaxir.core.shapes import checked_shapes


@checked_shapes
def is_word(ids: Int32[Array, "B L"]) -> Bool[Array, "B L"]:
    """Returns a mask of the tokens that are words: not padding (0), nor the special first or last token."""
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return (places > 0) & (places < (ids != 0).sum(1, dtype=jnp.int32)[:, None] - 1)


def most_chosen(length: int, share: float) -> int:
    """Returns the maximum number of tokens that `choose_tokens` chooses from a text of `length` tokens."""
    return max(1, min(length - 2, math.floor(share * (length - 2)) + 1))


@checked_shapes
def choose_tokens(ids: Int32[Array, "B L"], key: Key[Array, ""], *, share: float | int) -> Bool[Array, "B L"]:
    """Chooses words of each text, each with probability `share`, and at least one.

    From a text of n words share * n are chosen, rounded down or up at random, but at most `most_chosen`.
    Padding (0, on the right) and the special first and last token are never chosen.
    """
    of_counts, of_tokens = jax.random.split(key)
    inside = is_word(ids)
    wanted = share * inside.sum(1, dtype=jnp.float32) + jax.random.uniform(of_counts, (len(ids),))
    counts = jnp.clip(wanted.astype(jnp.int32), 1, most_chosen(ids.shape[1], share))
    draws = jnp.where(inside, jax.random.uniform(of_tokens, ids.shape), 2.0)
    return inside & (draws.argsort(axis=1).argsort(axis=1) < counts[:, None])


def places_of(chosen: jax.Array, most: int) -> jax.Array:
    """Returns the positions of the chosen tokens [B, L] in order, then other positions: int32 [B, most]."""
    return jnp.argsort(~chosen, axis=1)[:, :most].astype(jnp.int32)


@checked_shapes
def mask_as_bert(
    ids: Int32[Array, "B L"],
    chosen: Bool[Array, "B L"],
    key: Key[Array, ""],
    *,
    mask_id: int,
    vocab_size: int,
) -> Int32[Array, "B L"]:
    """Replaces the chosen tokens as in BERT's training (Devlin et al. 2019, section 3.1).

    80 % of the chosen tokens become the mask token, 10 % become a random token, and 10 % stay.
    """
    of_what, of_which = jax.random.split(key)
    draws = jax.random.uniform(of_what, ids.shape)
    random = jax.random.randint(of_which, ids.shape, 1, vocab_size, dtype=jnp.int32)
    replaced = jnp.where(draws < 0.8, mask_id, jnp.where(draws < 0.9, random, ids))
    return jnp.where(chosen, replaced, ids)


@checked_shapes
def close_gaps(x: Int32[Array, "B L"], kept: Bool[Array, "B L"]) -> Int32[Array, "B L"]:
    """Moves the kept items of each row of `x` to the front, in their order; the rest is filled with 0."""
    places = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    order = jnp.argsort(jnp.where(kept, places, places + x.shape[1]), axis=1)
    return jnp.take_along_axis(jnp.where(kept, x, 0), order, axis=1)
