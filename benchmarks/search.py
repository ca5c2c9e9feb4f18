"""Vector search: recall@10 against queries/s, build time, size and memory, beside faiss and hnswlib.

All systems get the same real embeddings (an EMB_DIR of jaxir.encode; some rows are held out as queries), the
same cores and as many threads. Each builds its index in a process of its own, and answers in another one that
has loaded it from disk; processes of the same kind take turns, one at a time.

    python benchmarks/search.py --embeddings=EMB_DIR [--peer_python=PYTHON] [--cores=1] [--repeats=5]

The peers need faiss-cpu and hnswlib in the environment of --peer_python (default: this one).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

K = 10
TARGET = 0.95
HNSW_LINKS, HNSW_BUILD = 32, 200
EXACT = ("jaxir exact", "faiss flat")
APPROXIMATE = (
    "jaxir scann float32",
    "jaxir scann bfloat16",
    "jaxir scann int8",
    "faiss HNSW",
    "faiss IVF-PQ fast-scan, refined",
    "hnswlib",
)
EF = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320)
Search = Callable[[np.ndarray], list[list]]  # queries [Q, D] -> K rows for each, as numbers or as ids
Load = Callable[[Path], Iterator[tuple[str, Search]]]  # an index -> its settings, narrow ones first


def main() -> int:
    """Parses flags, builds, measures in turns, prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--embeddings", help="what jaxir.encode wrote; at least 200,000 vectors say most")
    parser.add_argument("--queries", type=int, default=1000, help="rows held out as queries")
    parser.add_argument("--cores", type=int, default=1, help="how many cores and threads each system has")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each system that answer queries")
    parser.add_argument(
        "--systems", nargs="*", default=[*EXACT, *APPROXIMATE], choices=[*EXACT, *APPROXIMATE]
    )
    parser.add_argument("--peer_python", default=sys.executable, help="has faiss-cpu and hnswlib")
    parser.add_argument(
        "--worker", nargs=3, metavar=("BUILD|SEARCH", "SYSTEM", "DIRECTORY"), help=argparse.SUPPRESS
    )
    flags = parser.parse_args()
    if flags.worker:
        phase, system, directory = flags.worker
        print(json.dumps({"build": build, "search": search}[phase](system, Path(directory))))
        return 0
    if flags.embeddings is None:
        parser.error("--embeddings is needed: a directory that jaxir.encode wrote")

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.cores])  # of every process from here on
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        count, dimension = prepare(flags.embeddings, flags.queries, directory)
        print(
            f"{count:,} vectors of {dimension}, {flags.queries:,} queries, {flags.cores} core(s)", flush=True
        )
        built, runs = {}, {system: [] for system in flags.systems}
        for system in flags.systems:
            built[system] = run("build", system, directory, flags.peer_python)
            print(f"  built {system}: {built[system]['seconds']:.1f} s", flush=True)
        for repeat in range(flags.repeats):
            for system in flags.systems:
                runs[system].append(run("search", system, directory, flags.peer_python))
            print(f"  searched, repeat {repeat + 1} of {flags.repeats}", flush=True)
        report(built, runs)
    return 0


def prepare(embeddings: str, queries: int, directory: Path) -> tuple[int, int]:
    """Splits the vectors into a corpus and queries and finds the true neighbours, by plain numpy."""
    from jaxir.retrieval.embeddings import open_embeddings

    vectors = np.concatenate(open_embeddings(embeddings).shards)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    held_out = np.zeros(len(vectors), bool)
    held_out[np.random.default_rng(0).choice(len(vectors), queries, replace=False)] = True
    corpus, asked = vectors[~held_out], vectors[held_out]
    true = [np.argsort(-(corpus @ query), kind="stable")[:K] for query in asked]
    for name, array in (("corpus", corpus), ("queries", asked), ("true", np.array(true))):
        np.save(directory / f"{name}.npy", array)
    return corpus.shape


def run(phase: str, system: str, directory: Path, peer_python: str) -> dict:
    """Runs one phase of one system in its own process."""
    python = sys.executable if system.startswith("jaxir") else peer_python
    threads = str(len(os.sched_getaffinity(0)))
    environment = os.environ | {"OMP_NUM_THREADS": threads, "NPROC": threads, "JAX_PLATFORMS": "cpu"}
    command = [python, str(Path(__file__).resolve()), "--worker", phase, system, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{system}, {phase}, failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def build(system: str, directory: Path) -> dict:
    """Builds an index and writes it to a file or directory of its own; returns the time and the size."""
    corpus = np.load(directory / "corpus.npy", mmap_mode="r")
    target = directory / system
    started = time.perf_counter()
    if system.startswith("jaxir"):
        engine, _, storage = system.removeprefix("jaxir ").partition(" ")
        index = jaxir_index(engine, storage, corpus)
        seconds = time.perf_counter() - started
        index.save(target)
    elif system == "hnswlib":
        import hnswlib

        index = hnswlib.Index("ip", corpus.shape[1])
        index.init_index(
            len(corpus), M=HNSW_LINKS // 2, ef_construction=HNSW_BUILD
        )  # 2 M links on the ground
        index.set_num_threads(len(os.sched_getaffinity(0)))
        index.add_items(corpus)
        seconds = time.perf_counter() - started
        index.save_index(str(target))
    else:
        import faiss

        leaves = round(2 * len(corpus) ** 0.5)
        kind = {
            "faiss flat": "Flat",
            "faiss HNSW": f"HNSW{HNSW_LINKS // 2}",
            "faiss IVF-PQ fast-scan, refined": f"IVF{leaves},PQ{corpus.shape[1] // 2}x4fsr,RFlat",
        }[system]
        index = faiss.index_factory(corpus.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        if system == "faiss HNSW":
            index.hnsw.efConstruction = HNSW_BUILD
        index.train(np.ascontiguousarray(corpus))
        index.add(np.ascontiguousarray(corpus))
        seconds = time.perf_counter() - started
        faiss.write_index(index, str(target))
    files = [f for f in target.rglob("*") if f.is_file()] if target.is_dir() else [target]
    return {"seconds": seconds, "megabytes": sum(f.stat().st_size for f in files) / 1e6}


def jaxir_index(engine: str, storage: str, corpus: np.ndarray):
    """Builds one of ours; ScaNN's tuned for the target recall as `jaxir.index --target_recall` does it."""
    from jaxir.retrieval.exact import ExactIndex
    from jaxir.retrieval.scann_index import ScannIndex
    from jaxir.retrieval.tuning import Trial, tune

    ids = [str(row) for row in range(len(corpus))]
    if engine == "exact":
        return ExactIndex.build(corpus, ids)
    index = ScannIndex.build(corpus, ids, storage=storage)
    return tune(index, Trial(corpus, ids, similarity="cosine"), target=TARGET)[0]


def search(system: str, directory: Path) -> dict:
    """Loads an index and answers all queries in each of its settings; returns memory and the curve."""
    queries, true = np.load(directory / "queries.npy"), np.load(directory / "true.npy")
    load = {"jaxir": open_jaxir, "faiss": open_faiss, "hnswlib": open_hnswlib}[system.split()[0]]()
    before = resident()
    points = []
    for setting, answer in load(directory / system):
        answer(queries)  # compiles, wakes threads, touches the pages
        times = []
        for _ in range(3):
            started = time.perf_counter()
            found = answer(queries)
            times.append(time.perf_counter() - started)
        hits = [len(set(map(int, a)) & set(b)) for a, b in zip(found, true.tolist(), strict=True)]
        recall = sum(hits) / true.size
        points.append({"setting": setting, "recall": recall, "rate": len(queries) / min(times)})
        if recall > 0.995:
            break
    return {"points": points, "megabytes": resident() - before}


def resident() -> float:
    """Returns the memory that this process holds, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3


def open_jaxir() -> Load:
    """The tuned setting of an index, and wider and narrower ones about it."""
    from jaxir.retrieval import scann_index
    from jaxir.retrieval.index import load_index

    scann_index._scann()  # TensorFlow is no part of an index

    def load(path: Path) -> Iterator[tuple[str, Search]]:
        index = load_index(path)

        def answers(index) -> Search:
            return lambda queries: index.search(queries, K)[1]

        leaves = index.info.settings.get("leaves_to_search")
        if leaves is None:
            yield "", answers(index)
            return
        for factor in (0.5, 0.7, 1, 1.4, 2, 4):
            changed = index.with_settings(leaves_to_search=round(factor * leaves))
            yield (
                f"leaves {round(factor * leaves)}, reorder {index.info.settings['reorder']}",
                answers(changed),
            )

    return load


def open_faiss() -> Load:
    """HNSW by efSearch; IVF-PQ by probes, for several numbers of candidates that are compared again."""
    import faiss

    faiss.omp_set_num_threads(len(os.sched_getaffinity(0)))

    def load(path: Path) -> Iterator[tuple[str, Search]]:
        index = faiss.read_index(str(path))

        def answer(queries: np.ndarray) -> list[list[int]]:
            return index.search(queries, K)[1].tolist()

        if path.name == "faiss flat":
            yield "", answer
        elif path.name == "faiss HNSW":
            for ef in EF:
                index.hnsw.efSearch = ef
                yield f"efSearch {ef}", answer
        else:
            parameters = faiss.ParameterSpace()
            for probes in (4, 8, 12, 16, 24, 32, 48, 64, 96, 128):
                for factor in (4, 8, 16, 32):
                    parameters.set_index_parameters(index, f"nprobe={probes},k_factor_rf={factor}")
                    yield f"nprobe {probes}, k_factor {factor}", answer

    return load


def open_hnswlib() -> Load:
    """HNSW by ef."""
    import hnswlib

    def load(path: Path) -> Iterator[tuple[str, Search]]:
        dimension = np.load(path.with_name("queries.npy"), mmap_mode="r").shape[1]
        index = hnswlib.Index("ip", dimension)
        index.load_index(str(path))
        index.set_num_threads(len(os.sched_getaffinity(0)))
        for ef in EF:
            index.set_ef(ef)
            yield f"ef {ef}", lambda queries: index.knn_query(queries, K)[0].tolist()

    return load


def report(built: dict[str, dict], runs: dict[str, list[dict]]) -> None:
    """Prints, of each system, the fastest setting that reaches the target, and ratios to the peers."""

    def rate(system: str, n: int) -> float:
        return statistics.median(r["points"][n]["rate"] for r in runs[system])

    rates: dict[str, float] = {}
    print(f"\n{'':32} recall@10  queries/s  build s  disk MB  memory MB  setting")
    for system, repeats in runs.items():
        points = repeats[0]["points"]
        reaching = [n for n, p in enumerate(points) if p["recall"] >= TARGET]
        memory = statistics.median(r["megabytes"] for r in repeats)
        if not reaching:
            print(f"{system:32} {max(p['recall'] for p in points):9.4f}  does not reach {TARGET}")
            continue
        best = max(reaching, key=lambda n: rate(system, n))
        rates[system], cost = rate(system, best), built[system]
        print(
            f"{system:32} {points[best]['recall']:9.4f} {rates[system]:10,.0f} {cost['seconds']:8.1f}"
            f" {cost['megabytes']:8.0f} {memory:10.0f}  {points[best]['setting']}"
        )
    print(f"\nqueries/s at recall {TARGET} or more, as a ratio; medians of {len(repeats)} processes")
    for ours in (s for s in rates if s.startswith("jaxir")):
        peers = EXACT[1:] if ours in EXACT else APPROXIMATE[3:]
        ratios = [f"{rates[ours] / rates[peer]:.2f} of {peer}" for peer in peers if peer in rates]
        print(f"{ours:32} {'; '.join(ratios)}")


if __name__ == "__main__":
    raise SystemExit(main())
