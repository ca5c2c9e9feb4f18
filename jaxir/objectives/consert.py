"""ConSERT: two views of a text, with shuffled tokens or with zeros in token vectors (Yan et al. 2021)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Rate, checked
from jaxir.losses.nt_xent import nt_xent
from jaxir.objectives.objective import Metrics
from jaxir.objectives.two_views import TwoViews, View

Augmentation = Literal["token_shuffling", "token_cutoff", "feature_cutoff", "embedding_dropout"]
SYMMETRIC = functools.partial(nt_xent, temperature=0.05)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ConSERT(TwoViews):
    """ConSERT (arXiv:2105.11741; Wang 2022, section 3.1.2): NT-Xent over two augmented views of each text.

    The encoder's own dropout is off. Each view has its own augmentations, or none. Wang's ConSERT_1 uses
    token shuffling in one view and feature cutoff in the other. ConSERT_2 uses token shuffling in one view
    and embedding dropout in the other.

    Attributes:
      loss: any contrastive loss.
      first: augmentations of the first view, applied in this order.
      second: augmentations of the second view, applied in this order.
      token_cutoff: the share of a text's tokens whose vectors become zero.
      feature_cutoff: the share of embedding dimensions that become zero in all token vectors of a text.
      embedding_dropout: the probability that a number of a token vector becomes zero.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = SYMMETRIC
    first: Sequence[Augmentation] = ("token_shuffling",)
    second: Sequence[Augmentation] = ("feature_cutoff",)
    token_cutoff: Rate = 0.15
    feature_cutoff: Rate = 0.2
    embedding_dropout: Rate = 0.2

    def __post_init__(self):
        super().__post_init__()
        if not any(name == "token_shuffling" or getattr(self, name) for name in (*self.first, *self.second)):
            raise UserError(
                f"ConSERT's two views of a text are equal: first={self.first!r} and second={self.second!r}"
                " change nothing; give one an augmentation with a rate above 0"
            )

    def views(self, ids: jax.Array, key: jax.Array) -> tuple[View, View]:
        """Returns two views of texts [B, L]: the texts with the augmentations `first` and `second`."""
        one, two = jax.random.split(key)
        return self._view(ids, self.first, one), self._view(ids, self.second, two)

    def _view(self, ids: jax.Array, augmentations: Sequence[Augmentation], key: jax.Array) -> View:
        edits = []
        for name, own in zip(augmentations, jax.random.split(key, max(len(augmentations), 1)), strict=False):
            if name == "token_shuffling":
                ids = shuffle_tokens(ids, own)
            elif name == "token_cutoff":
                edits.append(functools.partial(cut_tokens, key=own, share=self.token_cutoff))
            elif name == "feature_cutoff":
                edits.append(functools.partial(cut_features, key=own, share=self.feature_cutoff))
            else:
                edits.append(functools.partial(drop_numbers, key=own, rate=self.embedding_dropout))
        mask = ids != 0

        def edit(x: jax.Array) -> jax.Array:
            return functools.reduce(lambda x, change: change(x, mask), edits, x)

        return View(ids, edit=edit if edits else None)


@checked_shapes
def shuffle_tokens(ids: Int32[Array, "B L"], key: Key[Array, ""]) -> Int32[Array, "B L"]:
    """Shuffles the words of each text; the special first and last token and the padding (0) stay.

    For an encoder this equals shuffling the position ids, because token order has no other effect.
    """
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    last = (ids != 0).sum(1, dtype=jnp.int32)[:, None] - 1
    inside = (places > 0) & (places < last)
    # Sort keys: -1 for the first token, a random number in [0, 1) for words, and the position for the rest.
    draws = jnp.where(inside, jax.random.uniform(key, ids.shape), places.astype(jnp.float32))
    draws = jnp.where(places == 0, -1.0, draws)
    return jnp.take_along_axis(ids, jnp.argsort(draws, axis=1), axis=1)


@checked_shapes
def cut_tokens(
    x: Float[Array, "B L E"], mask: Bool[Array, "B L"], *, key: Key[Array, ""], share: float | int
) -> Float[Array, "B L E"]:
    """Zeroes the vectors of round(share * n) randomly chosen tokens of each text, which has n tokens."""
    draws = jnp.where(mask, jax.random.uniform(key, mask.shape), 2.0)
    rank = jnp.argsort(jnp.argsort(draws, axis=1), axis=1)
    count = jnp.round(share * mask.sum(1, dtype=jnp.float32)).astype(jnp.int32)
    return jnp.where((rank < count[:, None])[..., None], 0.0, x).astype(x.dtype)


@checked_shapes
def cut_features(
    x: Float[Array, "B L E"], mask: Bool[Array, "B L"], *, key: Key[Array, ""], share: float | int
) -> Float[Array, "B L E"]:
    """Zeroes round(share * E) random embedding dimensions in all token vectors of a text."""
    draws = jax.random.uniform(key, (x.shape[0], x.shape[2]))
    rank = jnp.argsort(jnp.argsort(draws, axis=1), axis=1)
    return jnp.where((rank < round(share * x.shape[2]))[:, None], 0.0, x).astype(x.dtype)


@checked_shapes
def drop_numbers(
    x: Float[Array, "B L E"], mask: Bool[Array, "B L"], *, key: Key[Array, ""], rate: float | int
) -> Float[Array, "B L E"]:
    """Zeroes each number of token vectors with probability `rate`; unlike dropout, the rest is not scaled."""
    return jnp.where(jax.random.bernoulli(key, float(rate), x.shape), 0.0, x).astype(x.dtype)
