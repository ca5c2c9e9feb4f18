"""Approximate search with ScaNN: a partition tree, anisotropic hashing, and reordering of the best.

Guo et al., "Accelerating large-scale inference with anisotropic vector quantization", 2020;
Sun et al., "SOAR: improved indexing for approximate nearest neighbor search", 2023.
"""

import copy
import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.core.progress import silenced
from jaxir.retrieval.indexes.base_index import Embeddings, VectorIndex, describe_vectors
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.ids import descending_ranks
from jaxir.retrieval.indexes.index_info import IndexInfo, Similarity
from jaxir.retrieval.indexes.outliers import Outliers, find_outliers, load_outliers, no_outliers
from jaxir.retrieval.indexes.residuals import BITS, Residuals, find_residuals, load_residuals
from jaxir.retrieval.indexes.rows import contiguous, directory_of, main_directions, without
from jaxir.retrieval.indexes.scann_files import ASSETS, Storage, check_assets, int8_vectors, stored_vectors
from jaxir.retrieval.indexes.scann_instructions import use_avx2
from jaxir.runtime.lean_tensorflow import import_tensorflow
from jaxir.storage.temporary_outputs import temporary_directory

BRUTE_FORCE_UP_TO = 20_000  # number of vectors up to which comparing all is as fast as a tree, and exact
TRAINING_SAMPLE = 250_000  # maximum number of vectors that the tree is trained on
# SOAR (Sun et al. 2023): a vector is also in a second leaf. Its residuals in the two leaves are far from
# parallel, so fewer leaves need to be searched.
SOAR_LAMBDA, SOAR_OVERRETRIEVE = 1.5, 2.0
# 4-bit codes are computed from the PCA directions with the share ENERGY of the variance, at least half of all
# directions. If these are more than the share NEARLY_ALL, codes are computed from the dimensions instead.
ENERGY, NEARLY_ALL = 0.9, 0.75
# The numbers of leaves and candidates are for k = TUNED_FOR. Each further document of k needs
# CANDIDATES_PER_ANSWER more candidates and LEAF_DOCUMENTS_PER_ANSWER more documents in the searched leaves.
# With fewer, even a perfect tree misses some documents.
TUNED_FOR, CANDIDATES_PER_ANSWER, LEAF_DOCUMENTS_PER_ANSWER = 10, 4, 40
# The best k + k / MORE_SHARE + MORE documents by int8 are ordered again, by int8 and residuals.
MORE_SHARE, MORE = 2, 5


class ScannIndex(VectorIndex):
    """A ScaNN searcher that can be saved, loaded in another process, and changed.

    Each vector is in two of 2 sqrt(N) leaves. A query searches the nearest leaves, scores their vectors by
    4-bit codes (each of two PCA directions), and compares the best of them again by the stored vectors. An
    eighth of the leaves is searched and 200 candidates are compared again, unless `tuning.tune` chooses other
    numbers. An index of up to 20,000 vectors has no tree: all vectors are compared.

    ScaNN cannot change an index with vectors in two leaves, and would clip new int8 vectors. So after a
    change, the next search or `save` builds the index again. If fewer vectors are left than leaves, the index
    has no tree from then on.

    Attributes:
      outliers: rows that are zeros in ScaNN; `search` compares them with every query.
      residuals: what int8 rounds off; None: the vectors are not int8, or an older jaxir saved the index.
    """

    engine = "scann"

    def __init__(
        self,
        info: IndexInfo,
        ids: list[str],
        documents: Documents | None,
        searcher: Any,
        outliers: Outliers | None = None,
        residuals: Residuals | None = None,
    ):
        super().__init__(info, ids, documents)
        self._built = searcher
        self.outliers = outliers or no_outliers(info.dimension)
        self.residuals = residuals
        self._waiting: list[np.ndarray] | None = None
        self._near: Path | None = None  # parent of temporary directories for vectors; None: the system's
        self._hold(ids)

    def _hold(self, ids: list[str]) -> None:
        self.ids = ids
        self._ranks, self._names = descending_ranks(ids), np.array(ids, object)

    @classmethod
    def build(
        cls, embeddings: Embeddings, ids: Sequence[str], *, storage: Storage = "float32", **facts: Any
    ) -> "ScannIndex":
        """Makes an index of vectors; ScaNN copies them into memory, with 4, 2 or 1.5 bytes per number.

        Args:
          embeddings: float32 vectors [N, D], an array or its shards.
          ids: N distinct ids.
          storage: type of the stored vectors, which decide the order of results; smaller types cost recall.
            int8 has four more bits per number, which only the best candidates are compared by.
          **facts: `similarity` ("cosine", the default, or "dot"), and the `model` and its `fingerprint`.

        Raises:
          UserError: ids and vectors do not match, or vectors are not finite or too long.
        """
        info, shards = describe_vectors(cls.engine, embeddings, ids, **facts)
        settings, dimension, similarity = cls.settings_for(len(ids)), info.dimension, info.similarity
        outliers = find_outliers(shards, similarity, tree=bool(settings), int8=storage == "int8")
        if settings:
            settings["soar"] = SOAR_LAMBDA
            main = main_directions(shards, similarity, energy=ENERGY, zeros=outliers.rows)
            directions = max(main, dimension // 2)
            directions += directions % 2  # make it even, because a 4-bit code covers two directions
            if directions <= NEARLY_ALL * dimension:
                settings["directions"] = directions
        settings |= _stored(storage, outliers)
        searcher, residuals = _build(shards, similarity, settings, outliers)
        info = dataclasses.replace(info, settings=settings)
        return cls(info, list(ids), None, searcher, outliers, residuals)

    @staticmethod
    def settings_for(count: int) -> dict[str, Any]:
        """Returns the untuned settings for `count` vectors; {} means that all vectors are compared."""
        if count <= BRUTE_FORCE_UP_TO:
            return {}
        leaves = round(2 * count**0.5)
        leaves_to_search, reorder = _width(leaves)
        return {"leaves": leaves, "leaves_to_search": leaves_to_search, "reorder": reorder}

    @property
    def tuned(self) -> bool:
        settings = self.info.settings
        if "leaves" not in settings:
            return False
        return (settings["leaves_to_search"], settings["reorder"]) != _width(settings["leaves"])

    def with_settings(self, **changes: Any) -> "ScannIndex":
        other = copy.copy(self)
        other.info = dataclasses.replace(self.info, settings=self.info.settings | changes)
        return other

    @property
    def _searcher(self) -> Any:
        """ScaNN's searcher, built again if the vectors have changed."""
        if self._waiting is not None:
            how = self.info.similarity, self.info.settings, self.outliers
            self._built, self.residuals = _build(self._waiting, *how)
            self._waiting = None
        return self._built

    def vectors(self) -> list[np.ndarray]:
        """Returns shards of the vectors [N, D] in the order of the ids, memory-mapped."""
        if self._waiting is not None:
            return self._waiting
        # Save a copy: the directory from which the index was loaded may contain another index by now.
        near = self._near if self._near and os.access(self._near, os.W_OK) else None
        with temporary_directory(near) as place:
            self._save_engine(place)
            storage = self.info.settings["storage"]
            with stored_vectors(place, storage, self.outliers, self.residuals) as vectors:
                return [vectors]  # the memory map stays readable after its file is removed

    def _add(self, shards: list[np.ndarray], ids: list[str]) -> None:
        # Copy what the caller may still change; read-only memory-mapped shards stay on disk.
        own = [shard.copy() if shard.flags.writeable else shard for shard in shards]
        self._wait([*self.vectors(), *own], self.ids + ids, self.info.settings)

    def _delete(self, ids: set[str]) -> None:
        gone = np.flatnonzero([doc_id in ids for doc_id in self.ids])
        left = [doc_id for doc_id in self.ids if doc_id not in ids]
        settings = self.info.settings
        if len(left) < settings.get("leaves", 0):
            settings = {"storage": settings["storage"]}
        self._wait(without(self.vectors(), gone), left, settings)

    def _wait(self, vectors: list[np.ndarray], ids: list[str], settings: Mapping[str, Any]) -> None:
        """Replaces the vectors; the next search or `save` builds the ScaNN searcher."""
        tree, int8 = "leaves" in settings, settings["storage"] == "int8"
        outliers = find_outliers(vectors, self.info.similarity, tree=tree, int8=int8)
        settings = {name: value for name, value in settings.items() if name != "outliers"}
        settings |= _stored(settings["storage"], outliers)
        self.info = dataclasses.replace(self.info, settings=settings)
        self._waiting, self.outliers = vectors, outliers
        self._hold(ids)

    def without_soar(self) -> "ScannIndex":
        """Returns an index with each vector in one leaf and no residuals, as TensorFlow operations need.

        Its recall is lower.
        """
        left_out = ("soar", "directions", "residual_bits")
        settings = {name: value for name, value in self.info.settings.items() if name not in left_out}
        other = copy.copy(self)
        other.info = dataclasses.replace(self.info, settings=settings)
        other._built, _ = _build(self.vectors(), self.info.similarity, settings, self.outliers)
        other.residuals = other._waiting = None
        return other

    def without_residuals(self) -> "ScannIndex":
        """Returns an index that orders documents by int8 alone."""
        other = copy.copy(self)
        other._built, other._waiting, other.residuals = self._searcher, None, None
        return other

    def candidates(self, k: int) -> dict[str, int]:
        """Returns ScaNN's search arguments for k documents; {} if the index has no tree."""
        settings = self.info.settings
        if "leaves" not in settings:
            return {}
        more = k - TUNED_FOR
        least = -(-LEAF_DOCUMENTS_PER_ANSWER * more * settings["leaves"] // self.info.count)
        candidates = CANDIDATES_PER_ANSWER * more + min(
            settings["reorder"], CANDIDATES_PER_ANSWER * TUNED_FOR
        )
        return {
            "pre_reorder_num_neighbors": max(settings["reorder"], candidates, k),
            "leaves_to_search": min(settings["leaves"], max(settings["leaves_to_search"], least)),
        }

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        if not len(queries):
            return np.empty([0, k], np.float32), []
        found, values = self._nearest(queries, k)
        if len(self.outliers):
            # Search more if rows of zeros took ranks of other rows, so that fewer than k others were found.
            places = max(0, found.shape[1] - (self.info.count - len(self.outliers)))
            if (np.isin(found, self.outliers.rows).sum(axis=1) > places).any():
                found, values = self._nearest(queries, min(k + len(self.outliers), self.info.count))
        elif len(queries) == 1 and self._in_order(found[0], values[0], k):
            return values[:, :k], [self._names[found[0, :k]].tolist()]
        # Vectorised over queries, because a loop took a quarter of a batch's time.
        real = np.isfinite(values) & (found < self.info.count)
        rows = np.where(real, found, 0).astype(np.int64)
        values = np.where(real, values, -np.inf).astype(np.float32)
        if len(self.outliers):
            rows, values = self.outliers.merge(queries, rows, values)
        # ScaNN's results are ordered by score, so sort only queries with equal or missing scores.
        equal = np.flatnonzero(~(values[:, 1:] < values[:, :-1]).all(axis=1))
        if len(equal):
            order = np.lexsort((self._ranks[rows[equal]], -values[equal]))
            rows[equal] = np.take_along_axis(rows[equal], order, axis=1)
            values[equal] = np.take_along_axis(values[equal], order, axis=1)
        rows, values = rows[:, :k], values[:, :k]
        scores = np.full([len(queries), k], -np.inf, np.float32)
        scores[:, : values.shape[1]] = values
        ids = self._names[rows].tolist()
        real = np.isfinite(values)
        if not real.all():
            ids = [names[:count] for names, count in zip(ids, real.sum(axis=1).tolist(), strict=True)]
        return scores, ids

    def _nearest(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        candidates = self.candidates(k)
        if self.residuals is None:
            return self._by_scann(queries, k, candidates)
        # Do not make ScaNN compare more documents by int8 than it would otherwise.
        most = candidates.get("pre_reorder_num_neighbors", self.info.count)
        found, values = self._by_scann(queries, min(k + k // MORE_SHARE + MORE, most), candidates)
        # A missing document is row 0 with the score NaN.
        values = values + self.residuals.products(queries, found)
        order = np.arange(len(queries))[:, None], np.argsort(-values, axis=1)
        return found[order], values[order]

    def _by_scann(
        self, queries: np.ndarray, k: int, candidates: Mapping[str, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        if len(queries) > 1:
            return self._searcher.search_batched_parallel(queries, final_num_neighbors=k, **candidates)
        # Waking other threads would cost more than they save, and a batch of one takes an eighth longer.
        found, values = self._searcher.search(queries[0], final_num_neighbors=k, **candidates)
        return found[None], values[None]

    def _in_order(self, rows: np.ndarray, values: np.ndarray, k: int) -> bool:
        """Returns whether one query's results [K] are complete and have no equal scores, as is usual."""
        if len(values) < k or not (values[1:] < values[:-1]).all():
            return False
        return -np.inf < values[-1] <= values[0] < np.inf and rows.max() < self.info.count

    def _save_engine(self, directory: Path) -> None:
        (directory / ASSETS).mkdir()
        _serialize(self._searcher, directory / ASSETS)
        self.outliers.save(directory)
        if self.residuals is not None:
            self.residuals.save(directory)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> "ScannIndex":
        scann = _scann()
        if list((directory / ASSETS).glob("*.pkl")):
            raise UserError(
                f"{directory} contains a pickle, which could run any code, so jaxir did not write it: build"
                " the index again"
            )
        check_assets(directory / ASSETS)
        try:
            with silenced():
                searcher = scann.load_searcher(str((directory / ASSETS).resolve()))
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"{directory} is damaged: {error}; build it again with jaxir.index") from None
        found = info.settings.get("outliers", 0)
        outliers = load_outliers(directory, found, dimension=info.dimension)
        residuals = None
        if info.settings.get("residual_bits"):
            residuals = load_residuals(directory, info.count, dimension=info.dimension)
        index = cls(info, ids, documents, searcher, outliers, residuals)
        index._near = directory.resolve().parent
        return index


def _stored(storage: Storage, outliers: Outliers) -> dict[str, Any]:
    """Returns the settings that say how vectors are stored."""
    settings: dict[str, Any] = {"storage": storage}
    if storage == "int8":
        settings["residual_bits"] = BITS
    if len(outliers):
        settings["outliers"] = len(outliers)
    return settings


def _build(
    shards: Sequence[np.ndarray], similarity: Similarity, settings: Mapping[str, Any], outliers: Outliers
) -> tuple[Any, Residuals | None]:
    """Returns a ScaNN searcher for vectors [N, D] with zeros instead of outliers, and int8's residuals."""
    with silenced(), contiguous(shards, similarity, zeros=outliers.rows) as vectors:
        searcher = _build_searcher(vectors, settings)
        if "residual_bits" not in settings:
            return searcher, None
        with temporary_directory(directory_of(shards)) as place:
            _serialize(searcher, place)  # ScaNN gives its int8 vectors only as files
            return searcher, find_residuals(vectors, *int8_vectors(place))


def _serialize(searcher: Any, directory: Path) -> None:
    try:
        searcher.serialize(str(directory), relative_path=True)
    except RuntimeError as error:  # the error names neither a file nor a reason
        free = shutil.disk_usage(directory).free
        raise UserError(
            f"ScaNN could not write its index ({error}): free space on the disk, which has"
            f" {free / 1e6:,.1f} MB left, or give another --output"
        ) from error


def _build_searcher(vectors: np.ndarray, settings: Mapping[str, Any]) -> Any:
    scann, reorder = _scann(), _reorder_type(settings["storage"])
    builder = scann.builder(vectors, 10, "dot_product")
    if "leaves" not in settings:
        return builder.score_brute_force(reorder).build()
    if "directions" in settings:
        builder = builder.pca(settings["directions"], pca_significance_threshold=None)
    builder = builder.tree(
        num_leaves=settings["leaves"],
        num_leaves_to_search=settings["leaves_to_search"],
        training_sample_size=min(len(vectors), TRAINING_SAMPLE),
        soar_lambda=settings.get("soar"),
        overretrieve_factor=SOAR_OVERRETRIEVE if "soar" in settings else None,
    )
    builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2)
    return builder.reorder(settings["reorder"], reorder).build()


def _width(leaves: int) -> tuple[int, int]:
    return max(100, leaves // 8), 200


def _reorder_type(storage: Storage) -> Any:
    from scann.scann_ops.py.scann_builder import ReorderType

    return ReorderType[storage.upper()]


def _scann() -> ModuleType:
    """Imports ScaNN, which imports TensorFlow (some seconds)."""
    try:
        with silenced():
            if importlib.util.find_spec("scann"):
                import_tensorflow()
            from scann.scann_ops.py import scann_ops_pybind
        use_avx2()
    except ImportError as error:
        raise UserError(
            f"the scann backend needs ScaNN ({error}; Linux only): {how_to_install('scann')};"
            " or use --backend=exact"
        ) from None
    return scann_ops_pybind
