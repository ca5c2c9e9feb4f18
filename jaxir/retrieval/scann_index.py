"""Approximate search with ScaNN: a partition tree, anisotropic hashing, and exact reordering of the best.

Guo et al., "Accelerating large-scale inference with anisotropic vector quantization", 2020.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxir.errors import UserError
from jaxir.retrieval.documents import Documents
from jaxir.retrieval.index import (
    Embeddings,
    Index,
    IndexInfo,
    Similarity,
    checked,
    descending_ranks,
    normalize,
)

ASSETS = "scann"
# Below this a brute-force pass is as fast as the tree, and exact.
BRUTE_FORCE_UP_TO = 20_000
TRAINING_SAMPLE = 250_000


class ScannIndex(Index):
    """A ScaNN searcher that can be saved and loaded in another process.

    Vectors are partitioned into 2 sqrt(N) leaves; a query looks into the nearest 100, or an eighth of them
    where that is more, scores their vectors by 4-bit codes of two dimensions each, and compares the best of
    these exactly. Up to 20,000 vectors there is no tree: all are compared.
    """

    engine = "scann"

    def __init__(self, info: IndexInfo, ids: list[str], documents: Documents | None, searcher: Any):
        super().__init__(info, ids, documents)
        self._searcher = searcher
        self._ranks = descending_ranks(ids)

    @classmethod
    def build(
        cls,
        embeddings: Embeddings,
        ids: Sequence[str],
        *,
        similarity: Similarity = "cosine",
        fingerprint: str | None = None,
        model: str | None = None,
    ) -> "ScannIndex":
        scann = _scann()
        shards, ids = checked(embeddings, ids, similarity)
        vectors = np.concatenate(shards)
        if similarity == "cosine":
            vectors = normalize(vectors)
        settings = cls.settings_for(len(ids))
        builder = scann.builder(vectors, 10, "dot_product")
        if settings:
            builder = builder.tree(
                num_leaves=settings["leaves"],
                num_leaves_to_search=settings["leaves_to_search"],
                training_sample_size=min(len(ids), TRAINING_SAMPLE),
            )
            builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2)
            builder = builder.reorder(settings["reorder"])
        else:
            builder = builder.score_brute_force()
        info = IndexInfo(
            engine=cls.engine,
            similarity=similarity,
            dimension=vectors.shape[1],
            count=len(ids),
            fingerprint=fingerprint,
            model=model,
            settings=settings,
        )
        with _quiet():
            return cls(info, ids, None, builder.build())

    @staticmethod
    def settings_for(count: int) -> dict[str, int]:
        """Returns leaves, leaves searched and candidates reordered for `count` vectors; {}: brute force."""
        if count <= BRUTE_FORCE_UP_TO:
            return {}
        leaves = round(2 * count**0.5)
        return {"leaves": leaves, "leaves_to_search": max(100, leaves // 8), "reorder": 200}

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        scores = np.full([len(queries), k], -np.inf, np.float32)
        ids: list[list[str]] = []
        if not len(queries):
            return scores, ids
        candidates = {}
        if self.info.settings:
            candidates = {"pre_reorder_num_neighbors": max(self.info.settings["reorder"], 4 * k)}
            if 4 * k > self.info.count // 8:  # so many answers may lie in any of the leaves
                candidates["leaves_to_search"] = self.info.settings["leaves"]
        found, values = self._searcher.search_batched_parallel(queries, final_num_neighbors=k, **candidates)
        for row, (at, value) in enumerate(zip(found, values, strict=True)):
            real = np.isfinite(value) & (at < self.info.count)
            at, value = at[real].astype(np.int64), np.asarray(value[real], np.float32)
            order = np.lexsort((self._ranks[at], -value))
            scores[row, : len(order)] = value[order]
            ids.append([self.ids[i] for i in at[order]])
        return scores, ids

    def _save_engine(self, directory: Path) -> None:
        (directory / ASSETS).mkdir()
        try:
            self._searcher.serialize(str(directory / ASSETS), relative_path=True)
        except RuntimeError as error:  # it tells neither a file nor a reason
            free = shutil.disk_usage(directory).free
            raise UserError(
                f"ScaNN could not write its index ({error}); the disk has {free / 1e6:,.1f} MB free"
            ) from error

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> "ScannIndex":
        scann = _scann()
        try:
            with _quiet():
                searcher = scann.load_searcher(str((directory / ASSETS).resolve()))
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"{directory} is a damaged index: {error}") from None
        return cls(info, ids, documents, searcher)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what C++ libraries print to standard error meanwhile; ScaNN's log has no level to set."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123  (a device, not a file)
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _scann() -> ModuleType:
    """Imports ScaNN, which imports TensorFlow (some seconds)."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with _quiet():
            from scann.scann_ops.py import scann_ops_pybind
    except ImportError as error:
        raise UserError(
            f"the scann backend needs ScaNN ({error}): pip install 'jaxir[scann]' (Linux only),"
            " or use --backend=exact"
        ) from None
    return scann_ops_pybind
