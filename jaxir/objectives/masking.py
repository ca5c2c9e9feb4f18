"""Which tokens of a text are masked or left out, and what stands there instead."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Int32, Key, jaxtyped


@jaxtyped(typechecker=beartype)
def is_word(ids: Int32[Array, "B L"]) -> Bool[Array, "B L"]:
    """Returns where a text [B, L] has its own tokens: not padding (0), nor the special ones at both ends."""
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return (places > 0) & (places < (ids != 0).sum(1, dtype=jnp.int32)[:, None] - 1)


def most_chosen(length: int, share: float) -> int:
    """Returns how many tokens `choose_tokens` chooses at most of a text of `length`."""
    return max(1, min(length - 2, math.floor(share * (length - 2)) + 1))


@jaxtyped(typechecker=beartype)
def choose_tokens(ids: Int32[Array, "B L"], key: Key[Array, ""], *, share: float | int) -> Bool[Array, "B L"]:
    """Chooses tokens of each text, each with probability `share`, and at least one.

    Of n tokens share * n are chosen, rounded down or up by chance: never more than `most_chosen`. The first
    token and the last one, which are special, are never chosen; a text without others has none.

    Args:
      ids: [B, L]; 0 is padding, on the right.
      key: of the choice.
      share: of the tokens.
    """
    of_counts, of_tokens = jax.random.split(key)
    inside = is_word(ids)
    wanted = share * inside.sum(1, dtype=jnp.float32) + jax.random.uniform(of_counts, (len(ids),))
    counts = jnp.clip(wanted.astype(jnp.int32), 1, most_chosen(ids.shape[1], share))
    draws = jnp.where(inside, jax.random.uniform(of_tokens, ids.shape), 2.0)
    return inside & (draws.argsort(axis=1).argsort(axis=1) < counts[:, None])


def places_of(chosen: jax.Array, most: int) -> jax.Array:
    """Returns where texts' tokens are chosen [B, L], of which there are at most `most`: int32 [B, most].

    In their order; where there are fewer, places of others follow.
    """
    return jnp.argsort(~chosen, axis=1)[:, :most].astype(jnp.int32)


@jaxtyped(typechecker=beartype)
def mask_as_bert(
    ids: Int32[Array, "B L"],
    chosen: Bool[Array, "B L"],
    key: Key[Array, ""],
    *,
    mask_id: int,
    vocab_size: int,
) -> Int32[Array, "B L"]:
    """Replaces chosen tokens as BERT was trained (Devlin et al. 2019, section 3.1).

    Of these 80 % become the mask token, 10 % a random token, and 10 % stay.
    """
    of_what, of_which = jax.random.split(key)
    draws = jax.random.uniform(of_what, ids.shape)
    random = jax.random.randint(of_which, ids.shape, 1, vocab_size, dtype=jnp.int32)
    replaced = jnp.where(draws < 0.8, mask_id, jnp.where(draws < 0.9, random, ids))
    return jnp.where(chosen, replaced, ids)


@jaxtyped(typechecker=beartype)
def close_gaps(x: Int32[Array, "B L"], kept: Bool[Array, "B L"]) -> Int32[Array, "B L"]:
    """Returns of each row of x [B, L] what is kept, in its order, and zeros after it."""
    places = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    order = jnp.argsort(jnp.where(kept, places, places + x.shape[1]), axis=1)
    return jnp.take_along_axis(jnp.where(kept, x, 0), order, axis=1)
