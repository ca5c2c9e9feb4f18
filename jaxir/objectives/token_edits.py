"""Small changes of texts: some tokens are replaced, inserted or deleted."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Key

from jaxir.core.shapes import checked_shapes
from jaxir.objectives.masking import choose_tokens, close_gaps, most_chosen

Kind = Literal["replace", "insert", "delete"]
NEW = -2  # marks an inserted token; differs from all token ids and from features.PADDING_TOKEN (-1)


class Change(NamedTuple):
    """Changed texts, before a generator replaces their mask tokens.

    Attributes:
      ids: [B, M], the texts, with a mask token at each position that the generator fills; 0 is padding.
      masked: bool [B, M], the positions of mask tokens.
      most: the maximum number of mask tokens per text.
      original: [B, M], the token of the original text at each position; `NEW` at an inserted token, and at a
        token before which tokens were deleted.
    """

    ids: jax.Array
    masked: jax.Array
    most: int
    original: jax.Array


def make_change(ids: jax.Array, key: jax.Array, *, kind: Kind, share: float, mask_id: int) -> Change:
    """Changes `share` of the words of texts [B, L] to texts [B, M], where `longest` returns M."""
    if kind == "replace":
        chosen = choose_tokens(ids, key, share=share)
        return Change(jnp.where(chosen, mask_id, ids), chosen, most_chosen(ids.shape[1], share), ids)
    if kind == "insert":
        return insert_masks(ids, key, share=share, mask_id=mask_id)
    return delete_tokens(ids, key, share=share)


def longest(length: int, kinds: tuple[Kind, ...], share: float) -> int:
    """Returns M, the maximum length of a text of `length` tokens after a change of any of these kinds."""
    return length + (most_inserted(length, share) if "insert" in kinds else 0)


def most_inserted(length: int, share: float) -> int:
    """Returns the maximum number of tokens inserted into a text of `length` tokens, with 2 special ones."""
    return max(1, round(share * (length - 2)))


@checked_shapes
def insert_masks(
    ids: Int32[Array, "B L"], key: Key[Array, ""], *, share: float | int, mask_id: int
) -> Change:
    """Inserts round(share * n) mask tokens into each text, which has n words, and at least one.

    Each mask token is put before a random word or before the special last token. Texts without words do not
    change.
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


@checked_shapes
def delete_tokens(ids: Int32[Array, "B L"], key: Key[Array, ""], *, share: float | int) -> Change:
    """Deletes the tokens that `choose_tokens` chooses, and moves the rest left; nothing is masked."""
    kept = (ids != 0) & ~choose_tokens(ids, key, share=share)
    left = close_gaps(ids, kept)
    places = close_gaps(jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape), kept)
    gap = places - jnp.pad(places[:, :-1], ((0, 0), (1, 0))) > 1
    return Change(left, jnp.zeros_like(ids, bool), 0, jnp.where(gap, jnp.int32(NEW), left))
