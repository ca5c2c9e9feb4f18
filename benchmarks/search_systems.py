"""The programs that search.py compares: how each index is built, written, opened and searched."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

K = 10
HNSW_BUILD = 200  # efConstruction: number of candidates while an HNSW graph is built
CANDIDATES = (10, 12, 16, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 280, 400, 600)
EXACT = ("jaxir exact", "faiss flat")
TREES = ("jaxir scann float32", "jaxir scann bfloat16", "jaxir scann int8")
GRAPHS = ("faiss HNSW", "faiss HNSW, 8 bits", "USearch", "USearch, 8 bits")
CODES = ("faiss IVF-PQ fast-scan", "faiss IVF-PQ fast-scan, 8 bits")  # rescored with float32 or 8-bit vectors
PEERS = ("ScaNN", *GRAPHS, *CODES)


class Opened(NamedTuple):
    """An index: `answer(queries [Q, D], wide, again)` gives the K best rows for each query."""

    answer: Callable[[np.ndarray, int, int], list[list]]
    widest: int = 1  # maximum number of leaves, or maximum ef
    again: tuple[int, ...] = (0,)  # numbers of candidates to compare again


def ways(system: str, count: int, dimension: int) -> list[str]:
    """Returns the ways in which a system is built; jaxir is only built with its defaults."""
    leaves = [round(factor * count**0.5) for factor in (1, 2, 4)]
    return {
        "ScaNN": [f"leaves={n},soar=1.5" for n in leaves],
        "faiss HNSW": ["HNSW16", "HNSW32"],
        "faiss HNSW, 8 bits": ["HNSW16_SQ8"],
        "USearch": ["f32"],
        "USearch, 8 bits": ["i8"],
        "faiss IVF-PQ fast-scan": [f"IVF{n},PQ{dimension // 2}x4fsr,RFlat" for n in leaves[:2]],
        "faiss IVF-PQ fast-scan, 8 bits": [f"IVF{n},PQ{dimension // 2}x4fsr,Refine(SQ8)" for n in leaves[:2]],
        "faiss flat": ["Flat"],
    }.get(system, [""])


def build(directory: str, system: str, way: str) -> dict:
    """Builds an index and writes it to its own file or directory; returns the time and the size."""
    corpus = np.load(Path(directory, "corpus.npy"))
    target = Path(directory, f"{system} {way}")
    load_libraries(system)
    started = time.process_time()
    if system.startswith("jaxir"):
        from jaxir.retrieval.indexes.exact import ExactIndex
        from jaxir.retrieval.indexes.scann_index import ScannIndex

        ids, storage = list(map(str, range(len(corpus)))), system.split()[-1]
        exact = storage == "exact"
        index = ExactIndex.build(corpus, ids) if exact else ScannIndex.build(corpus, ids, storage=storage)
        seconds = time.process_time() - started
        index.save(target)
    elif system == "ScaNN":
        import scann

        settings = dict(part.split("=") for part in way.split(","))
        soar = float(settings["soar"])
        index = (
            scann.scann_ops_pybind.builder(corpus, K, "dot_product")
            .tree(
                int(settings["leaves"]),
                num_leaves_to_search=10,
                training_sample_size=len(corpus),
                soar_lambda=soar or None,
                overretrieve_factor=2.0 if soar else None,
            )
            .score_ah(2, anisotropic_quantization_threshold=0.2)
            .reorder(100)
            .build()
        )
        seconds = time.process_time() - started
        target.mkdir()
        index.serialize(str(target))
    elif system.startswith("USearch"):
        index = usearch_index(corpus.shape[1], way)
        index.add(np.arange(len(corpus)), corpus, threads=1)
        seconds = time.process_time() - started
        index.save(str(target))
    else:
        import faiss

        index = faiss.index_factory(corpus.shape[1], way, faiss.METRIC_INNER_PRODUCT)
        if "HNSW" in system:
            index.hnsw.efConstruction = HNSW_BUILD
        index.train(corpus)
        index.add(corpus)
        seconds = time.process_time() - started
        faiss.write_index(index, str(target))
    files = [f for f in target.rglob("*") if f.is_file()] if target.is_dir() else [target]
    return {"seconds": seconds, "megabytes": sum(f.stat().st_size for f in files) / 1e6}


def load_libraries(system: str) -> None:
    """Imports a system's libraries, so that their memory is not counted as the index's."""
    first = system.split()[0].rstrip(",").lower()
    for name in ("jaxir.retrieval.indexes.exact", "scann") if first == "jaxir" else (first,):
        importlib.import_module(name)


def usearch_index(dimension: int, dtype: str):
    from usearch.index import Index

    return Index(ndim=dimension, metric="ip", dtype=dtype, connectivity=16, expansion_add=HNSW_BUILD)


def opened(directory: str, system: str, way: str) -> Opened:
    """Loads an index that `build` wrote."""
    path = Path(directory, f"{system} {way}")
    if system.startswith("jaxir"):
        from jaxir.retrieval.indexes.base_index import load_index

        index = load_index(path)
        if "leaves" not in index.info.settings:
            return Opened(lambda queries, wide, again: index.search(queries, K)[1])
        set_to = functools.cache(
            lambda wide, again: index.with_settings(leaves_to_search=wide, reorder=again)
        )
        return Opened(lambda queries, wide, again: set_to(wide, again).search(queries, K)[1])
    if system == "ScaNN":
        import scann

        index = scann.scann_ops_pybind.load_searcher(str(path))
        leaves = int(way.split(",")[0].removeprefix("leaves="))
        return Opened(
            lambda queries, wide, again: index.search_batched(
                queries, final_num_neighbors=K, pre_reorder_num_neighbors=again, leaves_to_search=wide
            )[0].tolist(),
            leaves,
            CANDIDATES,
        )
    if system.startswith("USearch"):
        index = usearch_index(np.load(Path(directory, "queries.npy"), mmap_mode="r").shape[1], way)
        index.load(str(path))

        def of_usearch(queries: np.ndarray, wide: int, again: int) -> list[list]:
            index.expansion_search = max(K, wide)
            return index.search(queries, K, threads=1).keys.reshape(len(queries), -1).tolist()

        return Opened(of_usearch, 2000)
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.read_index(str(path))
    options = "nprobe={wide},k_factor_rf={again}" if system in CODES else "efSearch={wide}"

    def of_faiss(queries: np.ndarray, wide: int, again: int) -> list[list]:
        if system != "faiss flat":
            setting = options.format(wide=wide, again=again / K)
            faiss.ParameterSpace().set_index_parameters(index, setting)
        return index.search(queries, K)[1].tolist()

    if system in CODES:
        return Opened(of_faiss, int(way.split(",")[0].removeprefix("IVF")), CANDIDATES)
    return Opened(of_faiss, 1 if system == "faiss flat" else 2000)
