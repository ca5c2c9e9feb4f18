"""Small changes of texts to which vectors are to be sensitive: tokens replaced, inserted or deleted."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Int32, Key, jaxtyped

from jaxir.objectives.masking import choose_tokens, close_gaps, most_chosen

Kind = Literal["replace", "insert", "delete"]
NEW = -2  # the id of no token, not even of features.PADDING_TOKEN


class Change(NamedTuple):
    """Changed texts, before a generator has filled in their masks.

    Attributes:
      ids: [B, M], with the mask token at each place that the generator fills; 0 is padding, on the right.
      masked: [B, M], these places.
      most: how many of a text there are at most.
      original: [B, M], the token that must stand there for the place to count as unchanged; `NEW` at an
        inserted token, and at one before which a token was deleted.
    """

    ids: jax.Array
    masked: jax.Array
    most: int
    original: jax.Array


def make_change(ids: jax.Array, key: jax.Array, *, kind: Kind, share: float, mask_id: int) -> Change:
    """Changes texts [B, L] in one of the ways below."""
    if kind == "replace":
        return mask_tokens(ids, key, share=share, mask_id=mask_id)
    if kind == "insert":
        return insert_masks(ids, key, share=share, mask_id=mask_id)
    return delete_tokens(ids, key, share=share)


def longest(length: int, kinds: tuple[Kind, ...], share: float) -> int:
    """Returns M, the most tokens of a text of `length` tokens after any of these changes."""
    return length + (most_inserted(length, share) if "insert" in kinds else 0)


def most_inserted(length: int, share: float) -> int:
    """Returns how many tokens are inserted into a text of `length` tokens, the first and last one special."""
    return max(1, round(share * (length - 2)))


def mask_tokens(ids: jax.Array, key: jax.Array, *, share: float, mask_id: int) -> Change:
    """Masks tokens as `choose_tokens` chooses them: M = L."""
    chosen = choose_tokens(ids, key, share=share)
    return Change(jnp.where(chosen, mask_id, ids), chosen, most_chosen(ids.shape[1], share), ids)


@jaxtyped(typechecker=beartype)
def insert_masks(
    ids: Int32[Array, "B L"], key: Key[Array, ""], *, share: float | int, mask_id: int
) -> Change:
    """Inserts mask tokens: round(share * n) into a text of n words, and at least one; M is `longest`.

    Each stands before a word or the last token, which is special, any as likely as another. Into a text
    without words none is inserted.

    Args:
      ids: [B, L]; 0 is padding, on the right.
      key: of the places.
      share: of the words.
      mask_id: what is inserted.
    """
    rows, length = ids.shape
    slots = most_inserted(length, share)
    last = (ids != 0).sum(1, dtype=jnp.int32)[:, None] - 1
    words = last - 1
    count = jnp.maximum(jnp.round(share * words.astype(jnp.float32)).astype(jnp.int32), 1)
    given = (jnp.arange(slots, dtype=jnp.int32)[None] < count) & (words > 0)
    before = 1 + jnp.floor(jax.random.uniform(key, (rows, slots)) * last.astype(jnp.float32))
    end = jnp.float32(length + slots)
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.float32)[None], ids.shape)
    order = jnp.concatenate([places, jnp.where(given, before - 0.5, end)], axis=1).argsort(axis=1)

    def in_order(of_texts: jax.Array, of_slots: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.concatenate([of_texts, of_slots], axis=1), order, axis=1)

    masked = in_order(jnp.zeros_like(ids, bool), given)
    changed = in_order(ids, jnp.where(given, jnp.int32(mask_id), 0))
    return Change(changed, masked, slots, jnp.where(masked, jnp.int32(NEW), changed))


@jaxtyped(typechecker=beartype)
def delete_tokens(ids: Int32[Array, "B L"], key: Key[Array, ""], *, share: float | int) -> Change:
    """Deletes tokens as `choose_tokens` chooses them, and closes the gaps: M = L, and nothing is masked.

    Args:
      ids: [B, L]; 0 is padding, on the right.
      key: of the choice.
      share: of the words.
    """
    kept = (ids != 0) & ~choose_tokens(ids, key, share=share)
    left = close_gaps(ids, kept)
    places = close_gaps(jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape), kept)
    gap = places - jnp.pad(places[:, :-1], ((0, 0), (1, 0))) > 1
    return Change(left, jnp.zeros_like(ids, bool), 0, jnp.where(gap, jnp.int32(NEW), left))
