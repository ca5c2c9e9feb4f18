"""MUVERA: one vector for a text's token vectors, whose products approximate MaxSim.

Dhulipala et al. 2024, "MUVERA: Multi-Vector Retrieval via Fixed Dimensional Encodings" (arXiv:2405.19504,
section 2). Random hyperplanes split the space of tokens into clusters. A query's vector has the sum of its
tokens in each cluster, a passage's the mean, so a product adds, for each query token, the product with a
passage token that is probably near. Repetitions with other hyperplanes are appended.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Integer

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, Natural, checked

_BLOCK_TOKENS = 4096  # tokens that are encoded at once, for at most some 100 MB of temporary arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class FixedDimension:
    """The settings of `fixed_dimensions`; `of` completes them. Do not compare vectors of different settings.

    Attributes:
      dimension: F, the number of components of a text's vector.
      repetitions: R, the number of independent partitions.
      bits: hyperplanes of a partition, which has 2^bits clusters.
      projection: p, the components of a token after a random projection; tokens with at most p components are
        not projected.
      seed: the seed of all random numbers.
    """

    dimension: Count
    repetitions: Count
    bits: Count = 3  # docs/results/indexes.md has the recall of other values
    projection: Count = 16
    seed: Natural = 0

    @classmethod
    def of(
        cls, dimension: int, token_dimension: int, *, repetitions: int | None = None, **given: int
    ) -> FixedDimension:
        """Returns settings; without `repetitions`, these are as few as suffice for `dimension` components."""
        once = cls(dimension=dimension, repetitions=1, **given).inner(token_dimension)
        return cls(dimension=dimension, repetitions=repetitions or -(-dimension // once), **given)

    def inner(self, token_dimension: int) -> int:
        """Returns R 2^bits min(p, D), the number of components before the final projection."""
        return self.repetitions * (1 << self.bits) * min(self.projection, token_dimension)

    def check(self, token_dimension: int) -> None:
        """Raises a ValueError if tokens of D components give fewer than `dimension` components."""
        if (most := self.inner(token_dimension)) < self.dimension:
            raise ValueError(
                f"{self.dimension} dimensions are too many: {self.repetitions} repetitions of 2^{self.bits}"
                f" clusters of {min(self.projection, token_dimension)} components give only {most}; give"
                f" at most {most}, or more repetitions or bits"
            )


@checked_shapes
def fixed_dimensions(
    vectors: Float32[np.ndarray, "T D"],
    lengths: Integer[np.ndarray, " N"],
    tower: Literal["query", "passage"],
    how: FixedDimension,
) -> Float32[np.ndarray, "N F"]:
    """Returns a vector of F components for each of N texts, given the vectors of their tokens.

    The product of a query's and a passage's vector approximates their MaxSim. Without projections the
    product is never above MaxSim, and approaches it as `bits` grow; projections add noise with mean 0
    (Theorem 2.1 of the paper).

    Args:
      vectors: [T, D], those of all texts' tokens, one text after the other.
      lengths: [N], the numbers of tokens, which add up to T; a text without tokens gets zeros.
      tower: whether texts are queries or passages. A query's sums are divided by `repetitions`. A passage's
          clusters have means; an empty cluster gets the token with the fewest different bits (section 2.1).
      how: the settings.

    Raises:
      ValueError: `how` has more dimensions than its repetitions, clusters and projection give.
    """
    how.check(vectors.shape[1])
    found = np.zeros((len(lengths), how.dimension), np.float32)
    ends, start = np.cumsum(lengths), 0
    while start < len(lengths):
        before = int(ends[start] - lengths[start])
        stop = max(start + 1, int(np.searchsorted(ends, before + _BLOCK_TOKENS, side="right")))
        tokens = vectors[before : int(ends[stop - 1])]
        found[start:stop] = _of_block(tokens, lengths[start:stop], tower, how)
        start = stop
    return found


class _Drawn(NamedTuple):
    planes: np.ndarray  # [D, R bits], the normal vectors of the hyperplanes
    projections: np.ndarray | None  # [D, R p], signs / sqrt(p); None: tokens stay as they are
    sketch: Any  # sparse [R 2^bits p, F]; None: no final projection


@functools.lru_cache(maxsize=4)
def _drawn(how: FixedDimension, dimension: int) -> _Drawn:
    # RandomState gives the same numbers in all versions of NumPy; those of a Generator may change.
    random = np.random.RandomState(how.seed)
    planes = random.standard_normal((dimension, how.repetitions * how.bits)).astype(np.float32)
    projections = sketch = None
    if how.projection < dimension:
        signs = random.randint(0, 2, (dimension, how.repetitions * how.projection)) * 2 - 1
        projections = (signs / np.sqrt(how.projection)).astype(np.float32)
    if (inner := how.inner(dimension)) > how.dimension:
        import scipy.sparse  # takes a tenth of a second, and `encode` imports this file

        # A count sketch (Charikar et al. 2002): each component goes to one other, with a random sign.
        signs = (random.randint(0, 2, inner) * 2 - 1).astype(np.float32)
        places = random.randint(0, how.dimension, inner)
        sketch = scipy.sparse.csr_array((signs, (np.arange(inner), places)), shape=(inner, how.dimension))
    return _Drawn(planes, projections, sketch)


def _of_block(
    vectors: np.ndarray, lengths: np.ndarray, tower: Literal["query", "passage"], how: FixedDimension
) -> np.ndarray:
    """Returns the vectors [N, F] of some texts."""
    import scipy.sparse

    (total, dimension), texts, repetitions = vectors.shape, len(lengths), how.repetitions
    drawn, clusters = _drawn(how, dimension), 1 << how.bits
    is_positive = (vectors @ drawn.planes > 0).reshape(total, repetitions, how.bits)
    codes = is_positive @ (1 << np.arange(how.bits))  # [T, R], the cluster of each token
    if drawn.projections is None:
        tokens = np.repeat(vectors[:, None], repetitions, axis=1)  # [T, R, p]
    else:
        tokens = (vectors @ drawn.projections).reshape(total, repetitions, -1)
    of_text = np.repeat(np.arange(texts), lengths)
    cells = (of_text[:, None] * repetitions + np.arange(repetitions)) * clusters + codes
    shape = texts * repetitions * clusters, total * repetitions
    ones = np.ones(cells.size, np.float32)
    sums = scipy.sparse.csr_array((ones, (cells.ravel(), np.arange(cells.size))), shape=shape)
    sums = sums @ tokens.reshape(-1, tokens.shape[2])
    if tower == "query":
        sums /= repetitions
    else:
        counts = np.bincount(cells.ravel(), minlength=len(sums))
        sums /= np.maximum(counts, 1)[:, None]
        _fill(sums, counts, tokens, codes, lengths, clusters)
    whole = sums.reshape(texts, -1)
    return whole if drawn.sketch is None else whole @ drawn.sketch


def _fill(
    means: np.ndarray,
    counts: np.ndarray,
    tokens: np.ndarray,
    codes: np.ndarray,
    lengths: np.ndarray,
    clusters: int,
) -> None:
    """Writes a text's nearest token into its empty clusters, the rows of `means` [N R C, p] with count 0."""
    total, repetitions = codes.shape
    full = np.flatnonzero(lengths)
    if not len(full):
        return
    bits = np.array([n.bit_count() for n in range(clusters)], np.int32)
    # Each key combines a token's number of different bits and its index; the least key is the nearest
    # token's.
    keys = (
        bits[codes[:, :, None] ^ np.arange(clusters)] * total
        + np.arange(total, dtype=np.int32)[:, None, None]
    )
    starts = (np.cumsum(lengths) - lengths)[full]
    nearest = np.full((len(lengths), repetitions, clusters), -1, np.int64)
    nearest[full] = np.minimum.reduceat(keys, starts, axis=0) % total
    empty = np.flatnonzero((counts == 0) & (nearest.reshape(-1) >= 0))
    means[empty] = tokens[nearest.reshape(-1)[empty], empty // clusters % repetitions]
