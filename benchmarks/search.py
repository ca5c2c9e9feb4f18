"""Vector search at equal recall: queries/s, build time, size, memory; beside ScaNN itself, faiss, hnswlib.

All systems get the same real embeddings (an EMB_DIR of jaxir.encode; some rows are held out as queries), one
core and one thread. Peers are built in several ways. For each of these, and for each number of candidates
that are compared again, the fewest leaves (or the least ef), of all whole numbers, are found that reach a
recall@10 of .95 and of .99. The quickest settings are then timed in processes that take turns, in CPU time,
which on a quiet machine is the wall's. Settings are chosen on the queries that are timed, for all alike.

    python benchmarks/search.py --embeddings=EMB_DIR [--peer_python=PYTHON] [--repeats=5]

The peers need faiss-cpu and hnswlib in the environment of --peer_python (default: this one).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

K = 10
TARGETS = (0.95, 0.99)
HNSW_BUILD = 200  # efConstruction
CANDIDATES = (10, 14, 20, 25, 30, 35, 40, 50, 60, 70, 80, 100, 120, 150, 200, 300, 400)
FACTORS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # candidates of IVF-PQ, for each answer
KEPT = 3  # settings that are timed, of each system and target
EXACT = ("jaxir exact", "faiss flat")
TREES = ("jaxir scann float32", "jaxir scann bfloat16", "jaxir scann int8")
PEERS = ("ScaNN", "faiss HNSW", "faiss IVF-PQ fast-scan, refined", "hnswlib")


class Opened(NamedTuple):
    """An index: `answer(queries [Q, D], wide, again)` gives the K best rows for each query."""

    answer: Callable[[np.ndarray, int, int], list[list]]
    widest: int = 1  # leaves, or ef
    again: tuple[int, ...] = (0,)  # candidates that are compared again


class Found(NamedTuple):
    """A setting that reaches a target."""

    target: float
    wide: int
    again: int
    recall: float
    seconds: float  # of all queries


def main() -> int:
    """Parses flags, builds, chooses settings, measures in turns, prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    systems = [*EXACT, *TREES, *PEERS]
    parser.add_argument("--embeddings", help="what jaxir.encode wrote")
    parser.add_argument("--queries", type=int, default=1000, help="rows held out as queries")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each system that answer queries")
    parser.add_argument("--systems", nargs="*", default=systems, choices=systems)
    parser.add_argument("--peer_python", default=sys.executable, help="has faiss-cpu and hnswlib")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        phase, *arguments = flags.worker
        print(json.dumps({"build": build, "choose": choose, "measure": measure}[phase](*arguments)))
        return 0
    if flags.embeddings is None:
        parser.error("--embeddings is needed: a directory that jaxir.encode wrote")

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # of every process from here on
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        count, dimension = prepare(flags.embeddings, flags.queries, directory)
        print(f"{count:,} vectors of {dimension}, {flags.queries:,} queries, one core", flush=True)
        worker = functools.partial(run, directory=directory, peer_python=flags.peer_python)
        built, chosen = {}, {}
        for system in flags.systems:
            for way in ways(system, count, dimension):
                built[system, way] = worker("build", system, way)
                found = [Found(*f) for f in worker("choose", system, way)]
                chosen |= {(system, way, f): [] for f in found}
                print(
                    f"  {system} {way}: built in {built[system, way]['seconds']:.1f} s, {shown(found)}",
                    flush=True,
                )
        chosen = quickest(chosen)
        memory = {key: [] for key in dict.fromkeys(key[:2] for key in chosen)}
        for repeat in range(flags.repeats):
            for system, way in memory:
                settings = [f for *key, f in chosen if key == [system, way]]
                done = worker("measure", system, way, json.dumps(settings))
                memory[system, way].append(done["megabytes"])
                for f, seconds in zip(settings, done["seconds"], strict=True):
                    chosen[system, way, f].append(flags.queries / seconds)
            print(f"  measured, repeat {repeat + 1} of {flags.repeats}", flush=True)
        report(flags.systems, built, chosen, memory)
    return 0


def prepare(embeddings: str, queries: int, directory: Path) -> tuple[int, int]:
    """Splits the vectors into a corpus and queries and finds the true neighbours, by plain numpy."""
    from jaxir.retrieval.encoding.embeddings import open_embeddings

    vectors = np.concatenate(open_embeddings(embeddings).shards)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    held_out = np.zeros(len(vectors), bool)
    held_out[np.random.default_rng(0).choice(len(vectors), queries, replace=False)] = True
    corpus, asked = vectors[~held_out], vectors[held_out]
    true = [np.argsort(-(corpus @ query), kind="stable")[:K] for query in asked]
    for name, array in (("corpus", corpus), ("queries", asked), ("true", np.array(true))):
        np.save(directory / f"{name}.npy", array)
    return corpus.shape


def run(phase: str, system: str, *arguments: str, directory: Path, peer_python: str):
    """Runs one phase of one system in its own process."""
    ours = system.startswith("jaxir") or system == "ScaNN"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable if ours else peer_python, str(Path(__file__).resolve())]
    command += ["--worker", phase, str(directory), system, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{system}, {phase}, failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ways(system: str, count: int, dimension: int) -> list[str]:
    """Returns the ways in which a system is built; jaxir's users have one."""
    leaves = [round(factor * count**0.5) for factor in (1, 2, 4)]
    return {
        "ScaNN": [f"leaves={n},soar={soar}" for n in leaves for soar in (0, 1.5)],
        "faiss HNSW": ["HNSW8", "HNSW16"],
        "hnswlib": ["M=8", "M=16"],
        "faiss IVF-PQ fast-scan, refined": [f"IVF{n},PQ{dimension // 2}x4fsr,RFlat" for n in leaves],
        "faiss flat": ["Flat"],
    }.get(system, [""])


def build(directory: str, system: str, way: str) -> dict:
    """Builds an index and writes it to a file or directory of its own; returns the time and the size."""
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
    elif system == "hnswlib":
        import hnswlib

        index = hnswlib.Index("ip", corpus.shape[1])
        index.init_index(len(corpus), M=int(way.removeprefix("M=")), ef_construction=HNSW_BUILD)
        index.set_num_threads(1)
        index.add_items(corpus)
        seconds = time.process_time() - started
        index.save_index(str(target))
    else:
        import faiss

        index = faiss.index_factory(corpus.shape[1], way, faiss.METRIC_INNER_PRODUCT)
        if system == "faiss HNSW":
            index.hnsw.efConstruction = HNSW_BUILD
        index.train(corpus)
        index.add(corpus)
        seconds = time.process_time() - started
        faiss.write_index(index, str(target))
    files = [f for f in target.rglob("*") if f.is_file()] if target.is_dir() else [target]
    return {"seconds": seconds, "megabytes": sum(f.stat().st_size for f in files) / 1e6}


def load_libraries(system: str) -> None:
    """Imports what a system needs, which is no part of its index."""
    names = {"jaxir": ("jaxir.retrieval.indexes.exact", "scann"), "ScaNN": ("scann",)}.get(system.split()[0])
    for name in names or (system.split()[0],):
        importlib.import_module(name)


def opened(directory: str, system: str, way: str) -> Opened:
    """Loads an index that `build` wrote."""
    path = Path(directory, f"{system} {way}")
    if system.startswith("jaxir"):
        from jaxir.retrieval.indexes.index import load_index

        index = load_index(path)
        if "leaves" not in index.info.settings:
            return Opened(lambda queries, wide, again: index.search(queries, K)[1])
        return Opened(
            lambda queries, wide, again: index.with_settings(leaves_to_search=wide, reorder=again).search(
                queries, K
            )[1],
            index.info.settings["leaves"],
            tuple(n for n in CANDIDATES if n >= 4 * K),  # it compares no fewer
        )
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
    if system == "hnswlib":
        import hnswlib

        index = hnswlib.Index("ip", np.load(Path(directory, "queries.npy"), mmap_mode="r").shape[1])
        index.load_index(str(path))
        index.set_num_threads(1)

        def of_hnswlib(queries: np.ndarray, wide: int, again: int) -> list[list]:
            index.set_ef(max(K, wide))
            return index.knn_query(queries, K)[0].tolist()

        return Opened(of_hnswlib, 1000)
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.read_index(str(path))
    options = {
        "faiss flat": "",
        "faiss HNSW": "efSearch={wide}",
        "faiss IVF-PQ fast-scan, refined": "nprobe={wide},k_factor_rf={again}",
    }[system]

    def of_faiss(queries: np.ndarray, wide: int, again: int) -> list[list]:
        faiss.ParameterSpace().set_index_parameters(index, options.format(wide=wide, again=again))
        return index.search(queries, K)[1].tolist()

    if system == "faiss flat":
        return Opened(of_faiss)
    if system == "faiss HNSW":
        return Opened(of_faiss, 1000)
    return Opened(of_faiss, int(way.split(",")[0].removeprefix("IVF")), FACTORS)


def choose(directory: str, system: str, way: str) -> list[Found]:
    """Returns the quickest settings that reach each target."""
    queries, true = (np.load(Path(directory, f"{name}.npy")) for name in ("queries", "true"))
    index = opened(directory, system, way)

    @functools.cache
    def recall(wide: int, again: int) -> float:
        found = index.answer(queries, wide, again)
        hits = [len(set(map(int, a)) & set(b)) for a, b in zip(found, true.tolist(), strict=True)]
        return sum(hits) / true.size

    found = []
    for target in TARGETS:
        narrowest: list[int] = []
        for again in index.again:
            wide = 1
            while wide < index.widest and recall(wide, again) < target:
                wide = min(index.widest, 2 * wide)
            if recall(wide, again) < target:
                continue
            low = wide // 2 + 1
            while low < wide:
                middle = (low + wide) // 2
                low, wide = (low, middle) if recall(middle, again) >= target else (middle + 1, wide)
            found.append(Found(target, wide, again, recall(wide, again), 0))
            narrowest.append(wide)
            if narrowest[-3:-2] == [wide]:  # more candidates need no fewer leaves any more
                break
    seconds = timed(index, queries, found, passes=3)
    found = [f._replace(seconds=s) for f, s in zip(found, seconds, strict=True)]
    return [
        f
        for t in TARGETS
        for f in sorted((f for f in found if f.target == t), key=lambda f: f.seconds)[:KEPT]
    ]


def timed(index: Opened, queries: np.ndarray, settings: list[Found], *, passes: int) -> list[float]:
    """Returns the CPU time of all queries in each setting, the least of some passes."""
    least = [float("inf")] * len(settings)
    for _ in range(passes + 1):  # the first compiles, wakes threads, touches the pages
        for n, setting in enumerate(settings):
            started = time.process_time()
            index.answer(queries, setting.wide, setting.again)
            least[n] = min(least[n], time.process_time() - started)
    return least


def measure(directory: str, system: str, way: str, settings: str) -> dict:
    """Loads an index and answers all queries in each of some settings; returns times and memory."""
    queries = np.load(Path(directory, "queries.npy"))
    load_libraries(system)
    before = resident()
    index = opened(directory, system, way)
    seconds = timed(index, queries, [Found(*f) for f in json.loads(settings)], passes=5)
    return {"seconds": seconds, "megabytes": resident() - before}


def resident() -> float:
    """Returns the memory that this process holds, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3


def shown(found: list[Found]) -> str:
    first = {f.target: f for f in reversed(found)}
    parts = [f"{t} by {f.wide}/{f.again} in {f.seconds:.3f} s" for t, f in sorted(first.items())]
    return ", ".join(parts) or "reaches no target"


def quickest(chosen: dict) -> dict:
    """Returns the few settings of each system and target, of all its ways, that were quickest so far."""
    kept = {}
    for system, target in dict.fromkeys((key[0], key[2].target) for key in chosen):
        of_both = [k for k in chosen if k[0] == system and k[2].target == target]
        kept |= dict.fromkeys(sorted(of_both, key=lambda k: k[2].seconds)[:KEPT])
    return {key: [] for key in kept}


def report(systems: list[str], built: dict, chosen: dict, memory: dict) -> None:
    """Prints, of each system and target, the fastest setting, and ratios to the peers."""
    for target in TARGETS:
        rates: dict[str, float] = {}
        print(f"\n{f'recall@10 {target}':32} recall@10  queries/s  build s  disk MB  memory MB  setting")
        for system in systems:
            rows = [k for k in chosen if k[0] == system and k[2].target == target]
            if not rows:
                print(f"{system:32} does not reach it")
                continue
            _, way, found = best = max(rows, key=lambda k: statistics.median(chosen[k]))
            rates[system], cost = statistics.median(chosen[best]), built[system, way]
            print(
                f"{system:32} {found.recall:9.4f} {rates[system]:10,.0f} {cost['seconds']:8.1f}"
                f" {cost['megabytes']:8.0f} {statistics.median(memory[system, way]):10.0f}"
                f"  {way} {found.wide}/{found.again}"
            )
        for ours in (s for s in rates if s.startswith("jaxir")):
            peers = EXACT[1:] if ours in EXACT else PEERS
            ratios = [f"{rates[ours] / rates[peer]:.2f} of {peer}" for peer in peers if peer in rates]
            print(f"{ours:32} {'; '.join(ratios)}")


if __name__ == "__main__":
    raise SystemExit(main())
