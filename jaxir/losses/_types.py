"""Types that several losses share. B rows, L tokens, D dimensions, N hard negatives of each row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxir.runtime.partitioning import constrain

Vectors = Float32[Array, "B D"]
Negatives = Float32[Array, "B N D"]
# Halves of 64-bit hashes of ids; equal keys mark duplicates.
Keys = Int32[Array, "B 2"]
NegativeKeys = Int32[Array, "B N 2"]
AllKeys = tuple[Keys | None, Keys | None, NegativeKeys | None]  # keys of queries, passages, hard negatives
Scalar = Float32[Array, ""]
Metrics = dict[str, Scalar]


class TokenVectors(NamedTuple):
    """Texts with a vector for each token, which MaxSim compares (`losses.maxsim`).

    Attributes:
      vectors: [B, L, D]; of hard negatives [B, N, L, D].
      mask: [B, L] or [B, N, L], true at the tokens to score.
      weight: [B], a factor of all scores of a query; None: 1.
    """

    vectors: Float32[Array, "*B L D"]
    mask: Bool[Array, "*B L"]
    weight: Float32[Array, " B"] | None = None

    @property
    def flat(self) -> "TokenVectors":
        """The texts of all lists one after the other: [B N, L, D]."""
        return TokenVectors(*(x.reshape(-1, *x.shape[2:]) for x in self[:2]))

    def in_lists(self, count: int) -> "TokenVectors":
        """The texts [B N, L, D] of all lists as [B, N, L, D], each list on the devices of its row."""

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(-1, count, *x.shape[1:])
            return constrain(x, ("batch", *[None] * (x.ndim - 1)))

        return TokenVectors(*map(split, self[:2]))

    def before(self, lists: "TokenVectors") -> "TokenVectors":
        """Returns [B, 1 + N, max(L, L'), D]: each text [B, L, D], then its list [B, N, L', D]."""
        length = max(x.mask.shape[-1] for x in (self, lists))

        def joined(one: jax.Array, more: jax.Array) -> jax.Array:
            sides = [one[:, None], more]
            pads = [[(0, 0), (0, 0), (0, length - x.shape[2]), *[(0, 0)] * (x.ndim - 3)] for x in sides]
            return jnp.concatenate([jnp.pad(x, pad) for x, pad in zip(sides, pads, strict=True)], axis=1)

        return TokenVectors(*(joined(*pair) for pair in zip(self[:2], lists[:2], strict=True)))


class HybridVectors(NamedTuple):
    """Texts as a hybrid encoder reads them (`jaxir.models.hybrid_encoder`): with three kinds of features.

    Attributes:
      dense: [B, D], one vector of each text; of hard negatives [B, N, D].
      ids: [B, L] or [B, N, L], the tokens of the texts.
      weights: [B, L] or [B, N, L], the weights of these tokens; if a token occurs several times, all but one
        have 0.
      tokens: the vectors of the tokens.
    """

    dense: Float32[Array, "*B D"]
    ids: Int32[Array, "*B L"]
    weights: Float32[Array, "*B L"]
    tokens: TokenVectors

    @property
    def flat(self) -> "HybridVectors":
        """The texts of all lists one after the other."""
        return HybridVectors(*(x.reshape(-1, x.shape[-1]) for x in self[:3]), self.tokens.flat)

    def in_lists(self, count: int) -> "HybridVectors":
        """The texts of all lists as [B, N, ...], each list on the devices of its row."""
        lists = (x.reshape(-1, count, x.shape[-1]) for x in self[:3])
        parts = (constrain(x, ("batch", None, None)) for x in lists)
        return HybridVectors(*parts, self.tokens.in_lists(count))


Embedded = Vectors | TokenVectors
EmbeddedNegatives = Negatives | TokenVectors
