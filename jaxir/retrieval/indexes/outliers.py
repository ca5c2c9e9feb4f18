"""Outliers: vectors far longer than the others, which are compared exactly instead of by ScaNN.

ScaNN has one int8 scale per dimension, and one codebook for all rows of a tree. A single vector that is 100
times as long makes both too coarse for all rows: recall@10 of 30,000 vectors fell from .99 to .75 (int8) and
.97 (float32).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import normalize
from jaxir.retrieval.indexes.index_info import Similarity
from jaxir.storage.npy import gather, pieces, read_npy, write_npy

# A row above OUTLIER times the median is an outlier; one above TOO_GREAT times is too great for int8. One row
# that is 3 times as long as the others costs int8 .003 of its recall; 6 times as long costs .02, 10 times as
# long .04.
OUTLIER, TOO_GREAT = 3.0, 6.0
# Maximum number of outliers, since every query is compared with all of them: 1/50 of the rows, 16 to 1000.
SHARE, LEAST, MOST = 50, 16, 1000
BLOCK = 16_384  # vectors measured at a time
ROWS, VECTORS = "outlier_rows.npy", "outliers.npy"


@dataclasses.dataclass(frozen=True)
class Outliers:
    """Outliers: ascending row numbers [A] (zeros in ScaNN), and vectors [A, D], of length 1 for cosine."""

    rows: np.ndarray
    vectors: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def merge(
        self, queries: np.ndarray, found: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds the outliers to ScaNN's rows and scores [Q, K]; returns both as [Q, K + A], unordered."""
        scores = np.where(np.isin(found, self.rows), -np.inf, scores)
        # einsum sums each row in the same order, so equal vectors have equal scores; BLAS does not.
        own = np.einsum("qd,ad->qa", queries, self.vectors)
        rows = np.broadcast_to(self.rows, own.shape)
        return np.concatenate([found, rows], axis=1), np.concatenate([scores, own], axis=1)

    def restored(self, vectors: np.ndarray, start: int) -> np.ndarray:
        """Returns vectors [n, D], which are the rows from `start` on, with outliers instead of zeros."""
        first, last = np.searchsorted(self.rows, [start, start + len(vectors)])
        restored = np.array(vectors, np.float32)
        restored[self.rows[first:last] - start] = self.vectors[first:last]
        return restored

    def save(self, directory: Path) -> None:
        if len(self):
            for name, array in ((ROWS, self.rows), (VECTORS, self.vectors)):
                with (directory / name).open("wb") as file:
                    write_npy(file, [array])


def load_outliers(directory: Path, count: int, *, dimension: int) -> Outliers:
    if not count:
        return no_outliers(dimension)
    rows = np.array(read_npy(directory / ROWS, np.int64, (count,)))
    return Outliers(rows, np.array(read_npy(directory / VECTORS, np.float32, (count, dimension))))


def no_outliers(dimension: int) -> Outliers:
    return Outliers(np.empty(0, np.int64), np.empty((0, dimension), np.float32))


def find_outliers(
    shards: Sequence[np.ndarray], similarity: Similarity, *, tree: bool, int8: bool
) -> Outliers:
    """Returns the rows of vectors [N, D] whose size is more than `OUTLIER` times that of the median row.

    The size of a row is its length (1 for cosine). For int8 it is the largest number of the row if that is
    relatively greater, because the largest number in a dimension sets the dimension's scale. For int8 a
    UserError is raised if the size of another row is more than `TOO_GREAT` times that of the median row.

    Args:
      tree: whether the index has a tree with coded rows, instead of comparing all rows.
    """
    count, dimension = sum(map(len, shards)), shards[0].shape[1]
    if not int8 and (similarity == "cosine" or not tree):
        return no_outliers(dimension)
    sizes = _relative_sizes(shards, similarity, int8=int8)
    most = min(max(LEAST, min(count // SHARE, MOST)), count)
    greatest = np.argsort(-sizes, kind="stable")
    rows = np.sort(greatest[:most][sizes[greatest[:most]] > OUTLIER])
    if int8 and len(rows) == most < count and (left := sizes[greatest[most]]) > TOO_GREAT:
        raise UserError(
            "the vectors differ too much in size for scann with --storage=int8, which has one scale per"
            f" dimension: besides the {most:,} largest, which are compared in float32, one is {left:.1f}"
            f" times as large as the median (at most {TOO_GREAT:g}). Give --storage=bfloat16, or"
            " --backend=exact --storage=int8, which scales each vector"
        )
    vectors = gather(shards, rows)
    return Outliers(rows, normalize(vectors) if similarity == "cosine" else vectors)


def zeroed(shards: Sequence[np.ndarray], rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yields vectors in pieces of at most `size` rows, with zeros in `rows` (ascending row numbers)."""
    start = 0
    for piece in pieces(shards, size):
        inside = rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + len(piece))] - start
        start += len(piece)
        if len(inside):
            piece = np.array(piece)
            piece[inside] = 0
        yield piece


def _relative_sizes(shards: Sequence[np.ndarray], similarity: Similarity, *, int8: bool) -> np.ndarray:
    """Returns the size of each row, [N], as a multiple of the median size of the rows that are not zero."""
    measured = []
    for piece in pieces(shards, BLOCK):
        piece = normalize(piece) if similarity == "cosine" else piece
        peaks = [np.abs(piece).max(axis=1)] if int8 else []
        measured.append(np.stack([np.linalg.norm(piece, axis=1), *peaks]))
    sizes = np.concatenate(measured, axis=1)
    for measure in sizes:
        measure /= np.median(measure[measure > 0]) if measure.any() else 1
    return sizes.max(axis=0)
