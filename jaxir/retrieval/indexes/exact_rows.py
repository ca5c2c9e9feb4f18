"""The stored vectors of an exact index, read and converted piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from jaxir.retrieval.indexes.rows import without
from jaxir.storage.npy import read_npy, stream_npy

Storage = Literal["float32", "bfloat16", "int8"]
# Storage -> (NumPy's type in memory, the type in a .npy file). The .npy format has no bfloat16.
DTYPES = {
    "float32": (np.dtype(np.float32), np.dtype(np.float32)),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)),
    "int8": (np.dtype(np.int8), np.dtype(np.int8)),
}
VECTORS, SCALES = "embeddings.npy", "scales.npy"
STEP = 16_384  # vectors converted at a time
INT8_MAX = 127  # the largest int8 code


class Rows:
    """N vectors [N, D] in float32, bfloat16 or int8, in memory or memory-mapped.

    Each int8 vector has its own scale, 1/127 of its largest number, independent of other vectors.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        storage: Storage,
        *,
        cosine: bool,
        multipliers: np.ndarray | None = None,
    ):
        """Takes float32 or stored shards [n, D]; `multipliers` [N] (see `read`) are 0 where unknown."""
        self.storage, self._cosine, self._shards = storage, cosine, list(shards)
        self._starts = np.cumsum([0, *map(len, shards)])
        self.count, self.dimension = int(self._starts[-1]), shards[0].shape[1]
        self._multipliers = np.zeros(self.count, np.float32) if multipliers is None else multipliers

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns stored vectors [M, D] and factors [M] of scores: the int8 scale, or 1/length for cosine."""
        if start >= stop:
            return np.zeros((0, self.dimension), DTYPES[self.storage][0]), np.zeros(0, np.float32)
        parts, scales = [], []
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        for shard in range(first, last + 1):
            at = self._starts[shard]
            part, part_scales = self._converted(self._shards[shard][max(0, start - at) : stop - at])
            parts.append(part)
            scales.append(part_scales)
        vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
        known = self._multipliers[start:stop]
        if not known.all():
            if self._cosine:
                lengths = np.linalg.norm(vectors.astype(np.float32, copy=False), axis=1)
                np.divide(1, lengths, where=lengths > 0, out=known)
            else:
                known[:] = np.where(known == 0, np.concatenate(scales), known)
        return vectors, known

    def at(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Like `read`, but for any rows that were read before: vectors [*rows.shape, D] and multipliers."""
        shard_of = np.searchsorted(self._starts, rows, side="right") - 1
        shards = np.unique(shard_of)
        if len(shards) == 1:
            vectors = np.take(self._shards[shards[0]], rows - self._starts[shards[0]], axis=0)
            return self._converted(vectors)[0], self._multipliers[rows]
        vectors = np.empty([*rows.shape, self.dimension], DTYPES[self.storage][0])
        for shard in shards:
            here = shard_of == shard
            vectors[here] = self._converted(self._shards[shard][rows[here] - self._starts[shard]])[0]
        return vectors, self._multipliers[rows]

    def with_added(self, shards: Sequence[np.ndarray]) -> Rows:
        unknown = np.zeros(sum(map(len, shards)), np.float32)
        known = np.concatenate([self._multipliers, unknown])
        return Rows([*self._shards, *shards], self.storage, cosine=self._cosine, multipliers=known)

    def without(self, rows: np.ndarray) -> Rows:
        """Returns all rows except `rows` (ascending), without copying vectors."""
        known = np.delete(self._multipliers, rows)
        return Rows(without(self._shards, rows), self.storage, cosine=self._cosine, multipliers=known)

    def save(self, directory: Path) -> None:
        written = DTYPES[self.storage][1]
        scales = np.empty(self.count if self.storage == "int8" and not self._cosine else 0, np.float32)

        def blocks() -> Iterator[np.ndarray]:
            for at in range(0, self.count, STEP):
                vectors, multipliers = self.read(at, min(at + STEP, self.count))
                scales[at : at + STEP] = multipliers[: len(scales)]
                yield vectors.view(written)

        with (directory / VECTORS).open("wb") as file:
            stream_npy(file, (self.count, self.dimension), written, blocks())
        if len(scales):
            with (directory / SCALES).open("wb") as file:
                stream_npy(file, scales.shape, scales.dtype, [scales])

    @classmethod
    def load(cls, directory: Path, storage: Storage, *, shape: tuple[int, int], cosine: bool) -> Rows:
        kept, written = DTYPES[storage]
        vectors = read_npy(directory / VECTORS, written, shape)
        scaled = storage == "int8" and not cosine
        scales = np.array(read_npy(directory / SCALES, np.float32, shape[:1])) if scaled else None
        return cls([vectors.view(kept)], storage, cosine=cosine, multipliers=scales)

    def _converted(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns vectors [n, D] in the storage type, and their scales [n]."""
        kept, _ = DTYPES[self.storage]
        ones = np.ones(len(vectors), np.float32)
        if vectors.dtype == kept:
            return vectors, ones
        if kept != np.int8:
            return vectors.astype(kept), ones
        scales = np.abs(vectors).max(axis=1) / np.float32(INT8_MAX)
        codes = np.rint(vectors / np.where(scales == 0, 1, scales)[:, None])
        return codes.astype(np.int8), scales
