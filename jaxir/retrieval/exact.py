"""Exact search: every query against every vector, block by block, on whatever device there is."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxir.errors import UserError
from jaxir.retrieval.documents import Documents
from jaxir.retrieval.index import (
    Embeddings,
    IndexInfo,
    Similarity,
    VectorIndex,
    checked,
    descending_ranks,
)
from jaxir.retrieval.npy import write_npy

BLOCK = 16_384  # vectors compared at a time
QUERY_BLOCK = 1024  # queries compared at a time: at most [1024, 16384] scores are in memory
NO_RANK = np.iinfo(np.int32).max


class ExactIndex(VectorIndex):
    """All inner products, in float32; the answers are exact and so are their ties.

    Vectors stay where they are (in memory, or in memory-mapped files) and are read block by block; on an
    accelerator that has room for them they stay on it after the first search.
    """

    engine = "exact"

    def __init__(
        self, info: IndexInfo, ids: list[str], documents: Documents | None, shards: Sequence[np.ndarray]
    ):
        super().__init__(info, ids, documents)
        self._shards = list(shards)
        self._ranks = descending_ranks(ids)
        self._ids_by_rank = sorted(ids, reverse=True)
        self._on_device: list[tuple[jax.Array, jax.Array]] = []

    @classmethod
    def build(
        cls,
        embeddings: Embeddings,
        ids: Sequence[str],
        *,
        similarity: Similarity = "cosine",
        fingerprint: str | None = None,
        model: str | None = None,
    ) -> "ExactIndex":
        shards, ids = checked(embeddings, ids, similarity)
        info = IndexInfo(
            engine=cls.engine,
            similarity=similarity,
            dimension=shards[0].shape[1],
            count=len(ids),
            fingerprint=fingerprint,
            model=model,
        )
        return cls(info, ids, None, shards)

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        parts = [queries[at : at + QUERY_BLOCK] for at in range(0, len(queries), QUERY_BLOCK)]
        # A last part of its own size would have its own program: one of few sizes serves all.
        padded = [np.pad(part, [(0, _padded_rows(len(part)) - len(part)), (0, 0)]) for part in parts]
        best = [
            (np.full([len(part), k], -np.inf, np.float32), np.full([len(part), k], NO_RANK, np.int32))
            for part in padded
        ]
        cosine = self.info.similarity == "cosine"
        for vectors, ranks in self._blocks():
            best = [
                _merge_block(part, vectors, ranks, *so_far, cosine=cosine)
                for part, so_far in zip(padded, best, strict=True)
            ]
        scores = np.empty([len(queries), k], np.float32)
        ids: list[list[str]] = []
        for at, part, (part_scores, part_ranks) in zip(
            itertools.count(0, QUERY_BLOCK), parts, best, strict=False
        ):
            scores[at : at + len(part)] = np.asarray(part_scores)[: len(part)]
            ids += [
                [self._ids_by_rank[r] for r in row] for row in np.asarray(part_ranks)[: len(part)].tolist()
            ]
        return scores, ids

    def _blocks(self) -> Iterator[tuple[np.ndarray | jax.Array, np.ndarray | jax.Array]]:
        """Yields (vectors [M, D], ranks [M] int32), all of one M; padding has the rank NO_RANK.

        Within a block vectors are in the order of their ranks, so that a top-k of it that prefers earlier
        ones, as `lax.top_k` does, breaks ties rightly.
        """
        if self._on_device:
            yield from self._on_device
            return
        keep = self._fits_on_device()
        size = min(BLOCK, _padded_rows(max(len(shard) for shard in self._shards)))
        start = 0
        for shard in self._shards:
            for at in range(0, len(shard), size):
                vectors = shard[at : at + size]
                ranks = self._ranks[start + at : start + at + len(vectors)]
                if (np.diff(ranks) < 0).any():
                    order = np.argsort(ranks)
                    vectors, ranks = vectors[order], ranks[order]
                missing = size - len(ranks)
                if missing:
                    vectors = np.pad(vectors, [(0, missing), (0, 0)])
                    ranks = np.pad(ranks, (0, missing), constant_values=NO_RANK)
                block = jax.device_put((vectors, ranks)) if keep else (vectors, ranks)
                if keep:
                    self._on_device.append(block)
                yield block
            start += len(shard)

    def _fits_on_device(self) -> bool:
        memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        return 4 * self.info.count * self.info.dimension < memory / 2

    def _save_engine(self, directory: Path) -> None:
        with (directory / "embeddings.npy").open("wb") as file:
            write_npy(file, self._shards)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> "ExactIndex":
        try:
            vectors = np.load(directory / "embeddings.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{directory} is a damaged index: {error}") from None
        if vectors.shape != (info.count, info.dimension) or vectors.dtype != np.float32:
            raise UserError(
                f"{directory} is a damaged index: embeddings.npy is {vectors.dtype} {vectors.shape}"
            )
        return cls(info, ids, documents, [vectors])


@functools.partial(jax.jit, static_argnames=["cosine"])
def _merge_block(
    queries: jax.Array,
    vectors: jax.Array,
    ranks: jax.Array,
    best_scores: jax.Array,
    best_ranks: jax.Array,
    *,
    cosine: bool,
) -> tuple[jax.Array, jax.Array]:
    """Takes a block into the best answers so far.

    Args:
      queries: [Q, D].
      vectors: [M, D], in ascending order of rank.
      ranks: [M] int32.
      best_scores: [Q, K] descending.
      best_ranks: [Q, K] int32.
      cosine: whether to divide by the lengths of the vectors.

    Returns:
      (best scores [Q, K], their ranks [Q, K]), by descending score, then ascending rank.
    """
    # The default precision of accelerators (bfloat16, TF32) would reorder near neighbours.
    scores = jnp.dot(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)
    if cosine:
        squares = jnp.sum(vectors * vectors, axis=1)
        scores *= jnp.where(squares > 0, jax.lax.rsqrt(squares), 0)[None, :]
    scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 would rank below 0.0
    scores = jnp.where((ranks == NO_RANK)[None, :], -jnp.inf, scores)
    k = best_scores.shape[1]
    scores, at = jax.lax.top_k(scores, min(k, len(ranks)))
    all_scores = jnp.concatenate([best_scores, scores], axis=1)
    all_ranks = jnp.concatenate([best_ranks, ranks[at]], axis=1)
    negative, all_ranks = jax.lax.sort((-all_scores, all_ranks), num_keys=2)
    return -negative[:, :k], all_ranks[:, :k]


def _padded_rows(count: int) -> int:
    """The next power of two, 8 or more."""
    return max(8, 1 << (count - 1).bit_length())
