"""Functions on vectors [N, D] in shards, on disk or in memory, that do not copy shards into memory."""

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxir.retrieval.indexes.base_index import normalize
from jaxir.retrieval.indexes.index_info import Similarity
from jaxir.retrieval.indexes.outliers import zeroed
from jaxir.storage.npy import pieces

BLOCK = 16_384  # vectors normalised at a time
SAMPLE = 100_000  # number of vectors that the PCA directions are computed from
NO_ROWS = np.empty(0, np.int64)


def main_directions(
    shards: Sequence[np.ndarray], similarity: Similarity, *, energy: float, zeros: np.ndarray = NO_ROWS
) -> int:
    """Returns how many PCA directions have the share `energy` of the variance; rows `zeros` are set to 0."""
    step, dimension = -(-sum(map(len, shards)) // SAMPLE), shards[0].shape[1]
    total, products, seen = np.zeros(dimension), np.zeros([dimension] * 2), 0
    for piece in zeroed(shards, zeros, BLOCK):
        sample = np.asarray(piece[::step])
        sample = normalize(sample) if similarity == "cosine" else sample
        total += sample.sum(axis=0, dtype=np.float64)
        products += sample.T @ sample
        seen += len(sample)
    # Subtract the mean: a component that all vectors share, large in some models, does not affect rankings.
    variances = np.linalg.eigvalsh(products - np.outer(total, total) / seen)[::-1]
    sums = np.cumsum(variances.clip(0))
    return int(np.searchsorted(sums, energy * sums[-1])) + 1


def without(shards: Sequence[np.ndarray], gone: np.ndarray) -> list[np.ndarray]:
    """Returns the shards without the rows `gone` (ascending row numbers)."""
    parts, start = [], 0
    for shard in shards:
        inside = gone[(gone >= start) & (gone < start + len(shard))] - start
        edges = [-1, *inside.tolist(), len(shard)]
        parts += [shard[a + 1 : b] for a, b in itertools.pairwise(edges) if b > a + 1]
        start += len(shard)
    return parts


def directory_of(shards: Sequence[np.ndarray]) -> Path | None:
    """Returns the writable directory of memory-mapped shards, else None.

    Its disk has room for temporary files of this size; the system's temporary directory may be in memory.
    """
    mapped = getattr(shards[0], "filename", None)
    return Path(mapped).parent if mapped and os.access(Path(mapped).parent, os.W_OK) else None


@contextlib.contextmanager
def contiguous(
    shards: Sequence[np.ndarray], similarity: Similarity, *, zeros: np.ndarray = NO_ROWS
) -> Iterator[np.ndarray]:
    """Yields vectors, normalised for cosine, as one array: a temporary file, or a single usable shard."""
    ready = similarity == "dot" or all(
        np.abs(np.linalg.norm(piece, axis=1) - 1).max() < 1e-5 for piece in pieces(shards, BLOCK)
    )
    if ready and len(shards) == 1 and not len(zeros):
        yield shards[0]
        return
    with tempfile.TemporaryFile(dir=directory_of(shards)) as file:
        # Write to the file, because a memory map does not report a full disk.
        for part in zeroed(shards, zeros, BLOCK):
            file.write(np.ascontiguousarray(part if ready else normalize(part), np.float32).data)
        file.flush()
        shape = (sum(map(len, shards)), shards[0].shape[1])
        yield np.memmap(file, np.float32, "r", shape=shape)
