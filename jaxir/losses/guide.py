"""The vectors of a guide, a second model, which a loss reads to leave out false negatives."""

from typing import NamedTuple

from jaxtyping import Array, Float32


class Guide(NamedTuple):
    """The vectors of another model, the guide, for the same batch (Solatorio 2024, arXiv:2402.16829).

    A negative j of row i is left out of the loss if the product of their guide vectors exceeds `limit` of
    row i. All arrays are constants: the loss has no gradient with respect to them.

    Attributes:
      query: the guide's vectors of the queries.
      passage: the guide's vectors of the passages.
      negatives: the guide's vectors of the hard negatives; None if the batch has none.
      limit: the largest similarity to row i that a negative may have.
    """

    query: Float32[Array, "B G"]
    passage: Float32[Array, "B G"]
    negatives: Float32[Array, "B N G"] | None
    limit: Float32[Array, " B"]
