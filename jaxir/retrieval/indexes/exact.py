"""Exact search: compares every query with every vector, block by block, on all devices."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxir.core.errors import UserError
from jaxir.core.platforms import local_devices
from jaxir.retrieval.indexes import rounding
from jaxir.retrieval.indexes.base_index import Embeddings, VectorIndex, describe_vectors
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.exact_rows import DTYPES, Rows, Storage
from jaxir.retrieval.indexes.ids import descending_ranks
from jaxir.retrieval.indexes.index_info import IndexInfo
from jaxir.retrieval.indexes.topk import NO_RANK, block_program, merge_program
from jaxir.runtime.cpu import has_quick_bfloat16
from jaxir.runtime.partitioning import MeshConfig, Partitioner

BLOCK = 16_384  # vectors that a device compares at a time
QUERY_BLOCK = 1024  # queries compared at a time: at most [1024, 16384] scores are in a device's memory
# Number of scores computed at a time on a CPU. These 8 MB fit the cache, and malloc reuses their memory.
CPU_SCORES = 1 << 21
CPU_BLOCK, CPU_BLOCK_PER_ANSWER = 4096, 64  # vectors compared at a time on a CPU: max(4096, 64 k)
RESCORED = 1 << 18  # vector components that are compared again at a time; few enough for the cache
ALIGNMENT = 64  # parts of the rows begin at multiples of this: JAX reads aligned memory without a copy
# Lets one thread at a time start collectives, so that all devices get them in the same order.
_merge_lock = threading.Lock()


class Block(NamedTuple):
    """Input of `topk.block_program`: M vectors on each of n devices. Padding has the rank NO_RANK."""

    vectors: jax.Array
    multipliers: jax.Array
    ranks: jax.Array


class ExactIndex(VectorIndex):
    """Compares all inner products: the results are exact, and so is the order of ties.

    The rows are split over the devices of this process, or of the mesh given to `on`. Vectors stay in memory
    or in memory-mapped files and are read block by block. Accelerators with enough memory keep the vectors
    after the first search.
    """

    engine = "exact"

    def __init__(self, info: IndexInfo, ids: list[str], documents: Documents | None, rows: Rows):
        super().__init__(info, ids, documents)
        self._partitioner: Partitioner | None = None
        self._hold(ids, rows)

    def _hold(self, ids: list[str], rows: Rows) -> None:
        self.ids, self._rows = ids, rows
        self._ranks = descending_ranks(ids)
        self._rows_by_rank = np.argsort(self._ranks)
        self._on_devices: list[Block] = []
        self._lengths: np.ndarray | None = None
        self._rounds_badly = False

    @classmethod
    def build(
        cls,
        embeddings: Embeddings,
        ids: Sequence[str],
        *,
        storage: Storage = "float32",
        target_recall: float | None = None,
        **facts: Any,
    ) -> ExactIndex:
        """Makes an index of vectors.

        Args:
          embeddings: float32 vectors [N, D], an array or its shards.
          ids: N distinct ids.
          storage: the type in which vectors are stored and compared; bfloat16 and int8 cost some recall.
          target_recall: the recall of `jax.lax.approx_max_k` on TPUs; None: exact, like other devices.
          **facts: `similarity` ("cosine", the default, or "dot"), and the `model` and its `fingerprint`.

        Raises:
          UserError: ids and vectors do not match, or vectors are not finite or too long.
        """
        info, shards = describe_vectors(cls.engine, embeddings, ids, **facts)
        if storage not in DTYPES:
            raise UserError(f"storage must be one of {', '.join(DTYPES)}, not {storage!r}")
        if target_recall is not None and not 0 < target_recall < 1:
            raise UserError(f"target_recall must be between 0 and 1, not {target_recall}")
        settings = {"storage": storage}
        if target_recall is not None:
            settings["target_recall"] = target_recall
        info = dataclasses.replace(info, settings=settings)
        return cls(info, list(ids), None, Rows(shards, storage, cosine=info.similarity == "cosine"))

    def on(self, partitioner: Partitioner) -> ExactIndex:
        """Returns an index of the same vectors, with rows split over all devices of a mesh.

        With several processes, each process makes the index, reads the rows of its own devices, and calls
        `search` with the same queries; all processes get the same results.
        """
        other = copy.copy(self)
        other._partitioner, other._on_devices = partitioner, []
        return other

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        if not len(queries):
            return np.empty([0, k], np.float32), []
        if self._partitioner is None:
            self._partitioner = MeshConfig().build(local_devices())
        quick = self._partitioner.on_cpu and len(queries) >= rounding.LEAST_QUERIES and has_quick_bfloat16()
        if quick and self._may_round(k):
            scores, ranks = self._best_by_rounding(queries, k)
        else:
            # Vectors of smaller types are always compared with bfloat16 queries.
            scores, ranks = self._best(queries, k, columns=quick and self._rows.storage != "float32")
        rows = self._rows_by_rank[ranks].tolist()
        return scores, [[self.ids[row] for row in answers] for answers in rows]

    def _may_round(self, k: int) -> bool:
        """Returns whether bfloat16 products may save time; they need all rows in this process."""
        own = all(d.process_index == jax.process_index() for d in self._partitioner.mesh.devices.flat)
        few = k <= rounding.MOST_ANSWERS and rounding.with_more(k) < self.info.count
        return self._rows.storage == "float32" and own and few and not self._rounds_badly

    def _best_by_rounding(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Like `_best`, but compares all vectors in bfloat16, and then only the best ones in float32."""
        rough, ranks = self._best(queries, rounding.with_more(k), columns=True)
        scores = np.empty(rough.shape, np.float32)
        step = max(1, RESCORED // (rough.shape[1] * self.info.dimension))
        for at in range(0, len(queries), step):
            vectors, multipliers = self._rows.at(self._rows_by_rank[ranks[at : at + step]])
            # Use einsum: a matrix product may give equal vectors different sums, depending on their rows.
            products = np.einsum("qd,qkd->qk", queries[at : at + step], vectors)
            scores[at : at + step] = products * multipliers + 0.0
        order = np.lexsort((ranks, -scores))[:, :k]
        scores, ranks = (np.take_along_axis(x, order, axis=1) for x in (scores, ranks))
        errors = rounding.greatest_errors(queries, *self._lengths)
        unknown = np.flatnonzero(~(scores[:, -1] > rough[:, -1] + errors))
        self._rounds_badly = len(unknown) > rounding.TOO_MANY * len(queries)
        if len(unknown):
            scores[unknown], ranks[unknown] = self._best(queries[unknown], k)
        return scores, ranks

    def _best(self, queries: np.ndarray, k: int, *, columns: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Returns the K best (scores [Q, K], ranks [Q, K]). With `columns`, compares in bfloat16."""
        mesh = self._partitioner.mesh
        recall = self.info.settings.get("target_recall")
        # Only approximate selection depends on the number of vectors. For exact search pass 0, so that
        # indexes of any size share compiled programs.
        total = self.info.count if recall is not None else 0
        take = block_program(mesh, recall, total, columns=columns)
        size, step = self._block_sizes(mesh, k)
        parts = [queries[at : at + step] for at in range(0, len(queries), step)]
        # The last part is padded, so that few programs are compiled. Padding is copies of a query: all
        # vectors would tie for a query of zeros, and selecting among ties is slow.
        padded = [np.pad(p, [(0, _padded(len(p)) - len(p)), (0, 0)], mode="edge") for p in parts]
        placed = [_place(part, mesh) for part in padded]
        before = best = [_nothing(mesh, len(part), k) for part in padded]
        # On a CPU, XLA's top-k uses only one core, so each core gets a part of the queries.
        cpu = self._partitioner.on_cpu
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:

            def compare(block, part, so_far):
                found = take(part, *block, *so_far)
                return jax.block_until_ready(found) if cpu else found

            for block in self._columns(mesh, size) if columns else self._blocks(mesh, size):
                jax.block_until_ready(before)  # waits, so that at most two blocks are computed at once
                before = best
                in_turn = pool.map if cpu else map
                best = list(in_turn(functools.partial(compare, block), placed, best))
        found = []
        for part, so_far in zip(parts, best, strict=True):
            with _merge_lock:
                merged = jax.block_until_ready(merge_program(mesh)(*so_far))
            found.append([np.asarray(x.addressable_data(0))[: len(part)] for x in merged])
        scores, ranks = (np.concatenate(x) for x in zip(*found, strict=True))
        return scores, ranks

    def _block_sizes(self, mesh: Mesh, k: int) -> tuple[int, int]:
        most = min(BLOCK, _padded(self._rows_of_a_device(mesh)))
        if not self._partitioner.on_cpu:
            return most, QUERY_BLOCK
        size = min(most, max(CPU_BLOCK, _padded(CPU_BLOCK_PER_ANSWER * k)))
        return size, min(QUERY_BLOCK, CPU_SCORES // size)

    def _rows_of_a_device(self, mesh: Mesh) -> int:
        return -(-self.info.count // mesh.size // ALIGNMENT) * ALIGNMENT

    def _blocks(self, mesh: Mesh, size: int) -> Iterator[Block]:
        """Yields all rows in blocks of `size` rows per device."""
        if self._on_devices:
            yield from self._on_devices
            return
        own = [(n, d) for n, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
        # Each device has a range of rows; a process only reads the rows of its own devices.
        rows = self._rows_of_a_device(mesh)
        needed = rows * self._rows.dimension * DTYPES[self._rows.storage][0].itemsize
        keep = needed < _memory([device for _, device in own]) / 2
        kept = []
        for at in range(0, rows, size):
            pieces = [
                jax.device_put(self._piece(n * rows + at, n * rows + min(at + size, rows), size), device)
                for n, device in own
            ]
            block = Block(*(_join(mesh, arrays) for arrays in zip(*pieces, strict=True)))
            if keep:
                kept.append(block)
            yield block
        self._on_devices = kept

    def _columns(self, mesh: Mesh, size: int) -> Iterator[Block]:
        """Like `_blocks`, but with vectors from `rounding.columns_program`; also sets `self._lengths`."""
        lengths = []
        for block in self._blocks(mesh, size):
            if self._lengths is None and self._rows.storage == "float32":
                lengths.append(rounding.lengths_program(mesh)(block.vectors, block.multipliers))
            yield block._replace(vectors=rounding.columns_program(mesh)(block.vectors))
        if lengths:
            self._lengths = np.max([np.max(x, axis=0) for x in lengths], axis=0)

    def _piece(self, start: int, stop: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns vectors [size, D], multipliers and ranks [size] of the rows [start, stop), padded."""
        start, stop = min(start, self.info.count), min(stop, self.info.count)
        vectors, multipliers = self._rows.read(start, stop)
        ranks, missing = self._ranks[start:stop], size - (stop - start)
        if missing:
            vectors = np.pad(vectors, [(0, missing), (0, 0)])
            multipliers = np.pad(multipliers, (0, missing))
            ranks = np.pad(ranks, (0, missing), constant_values=NO_RANK)
        return vectors, multipliers, ranks

    def _add(self, shards: list[np.ndarray], ids: list[str]) -> None:
        self._hold(self.ids + ids, self._rows.with_added(shards))

    def _delete(self, ids: set[str]) -> None:
        gone = np.flatnonzero([doc_id in ids for doc_id in self.ids])
        self._hold([doc_id for doc_id in self.ids if doc_id not in ids], self._rows.without(gone))

    def _save_engine(self, directory: Path) -> None:
        self._rows.save(directory)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> ExactIndex:
        rows = Rows.load(
            directory,
            info.settings.get("storage", "float32"),  # indexes of older versions have no "storage"
            shape=(info.count, info.dimension),
            cosine=info.similarity == "cosine",
        )
        return cls(info, ids, documents, rows)


def _memory(devices: Sequence[jax.Device]) -> int:
    """Returns the least memory of a device in bytes; 0 if unknown or shared with the host."""
    return min((device.memory_stats() or {}).get("bytes_limit", 0) for device in devices)


def _place(x: np.ndarray, mesh: Mesh) -> jax.Array:
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, PartitionSpec()), lambda _: x)


def _nothing(mesh: Mesh, queries: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns empty results: scores and ranks [n, Q, K] for n devices."""
    sharding, shape = NamedSharding(mesh, PartitionSpec(mesh.axis_names)), (mesh.size, queries, k)
    none = np.full((1, queries, k), -np.inf, np.float32), np.full((1, queries, k), NO_RANK, np.int32)
    return tuple(jax.make_array_from_callback(shape, sharding, lambda _, x=x: x) for x in none)


def _join(mesh: Mesh, arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the arrays [M, ...] of this process's devices as one global array [n M, ...]."""
    size, *rest = arrays[0].shape
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_single_device_arrays((mesh.size * size, *rest), sharding, list(arrays))


def _padded(count: int) -> int:
    return max(8, 1 << (count - 1).bit_length())
