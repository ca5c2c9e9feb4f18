"""Compares vector search with other programs: curves of recall and queries/s, and queries/s at equal recall.

All systems get the same real embeddings (an EMB_DIR of jaxir.encode; some rows are held out as queries),
one core and one thread. Peers are built in several ways. For each way, and each number of candidates that
are compared again, the script finds the fewest leaves (or the least ef) that reach each of several
recalls@10, and keeps the fastest of these settings. jaxir's settings are those that `index --target_recall`
finds. Settings are chosen on half of the queries. The other half is timed, and gives the recall. Times are
CPU times, in processes that take turns. Rates at a recall of exactly .95 or .99 are interpolated between
two points of a curve. The curve of an 8-bit index ends where its numbers can no longer distinguish
neighbours.

    python benchmarks/search.py --embeddings=EMB_DIR [--peer_python=PYTHON] [--repeats=5] [--table=FILE]

The peers need faiss-cpu and usearch in the environment of --peer_python (default: this one).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
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
from search_systems import CODES, EXACT, GRAPHS, PEERS, TREES, K, Opened, build, load_libraries, opened, ways

CURVE = (0.9, 0.94, 0.96, 0.985, 0.993, 0.997)  # recalls that settings are chosen for
EQUAL = (0.95, 0.99)  # recalls at which systems are compared
SINGLE = 200  # number of queries that are also searched one by one


class Setting(NamedTuple):
    """How far an index searches."""

    wide: int
    again: int


class Point(NamedTuple):
    """A point of a system's curve, measured on the queries that were not used to choose settings."""

    recall: float
    rate: float  # queries per CPU second, in one batch
    single: float  # queries per CPU second, one by one
    way: str
    setting: Setting
    target: float


def main() -> int:
    """Parses flags, builds, chooses settings, measures in turns, prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    systems = [*EXACT, *TREES, *PEERS]
    parser.add_argument("--embeddings", help="what jaxir.encode wrote")
    parser.add_argument("--queries", type=int, default=2000, help="rows held out as queries")
    parser.add_argument("--vectors", type=int, help="rows that are searched, drawn at random (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each system that answer queries")
    parser.add_argument("--systems", nargs="*", default=systems, choices=systems)
    parser.add_argument("--peer_python", default=sys.executable, help="has faiss-cpu and usearch")
    parser.add_argument("--work", help="keeps what is built and chosen; the same command goes on from there")
    parser.add_argument("--table", type=Path, help="a TSV file for the points of all curves")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        phase, *arguments = flags.worker
        print(json.dumps({"build": build, "choose": choose, "measure": measure}[phase](*arguments)))
        return 0
    if flags.embeddings is None:
        parser.error("--embeddings is needed: a directory that jaxir.encode wrote")

    # Also limits all processes started from here on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(flags.work or name)
        directory.mkdir(parents=True, exist_ok=True)
        count, dimension = prepare(flags.embeddings, flags.queries, flags.vectors, directory)
        print(f"{count:,} vectors of {dimension}, {flags.queries:,} queries, one core", flush=True)
        worker = functools.partial(run, directory=directory, peer_python=flags.peer_python)
        built, chosen = {}, {}
        for system in flags.systems:
            for way in ways(system, count, dimension):
                built[system, way] = once(directory, worker, "build", system, way)
                chosen[system, way] = once(directory, worker, "choose", system, way)
                seconds = built[system, way]["seconds"]
                reached = [target for target, *_ in chosen[system, way]]
                print(f"  {system} {way}: built in {seconds:.1f} s, reaches {reached}", flush=True)
        chosen = quickest(chosen)
        done: dict[tuple[str, str], list[dict]] = {key: [] for key in chosen}
        for repeat in range(flags.repeats):
            for (system, way), settings in chosen.items():
                done[system, way].append(worker("measure", system, way, json.dumps(settings)))
            print(f"  measured, repeat {repeat + 1} of {flags.repeats}", flush=True)
        points = curves(chosen, done)
        report(flags.systems, built, points, done)
        if flags.table is not None:
            write_table(flags.table, points)
    return 0


def once(directory: Path, worker: Callable, phase: str, system: str, way: str):
    """Runs a phase, or returns its stored result."""
    path = directory / f"{phase} {system} {way}.json"
    if not path.exists():
        path.write_text(json.dumps(worker(phase, system, way)))
    return json.loads(path.read_text())


def prepare(embeddings: str, queries: int, count: int | None, directory: Path) -> tuple[int, int]:
    """Splits the vectors into a corpus and queries and finds the true neighbours, by plain numpy."""
    from jaxir.retrieval.encoding.stored_embeddings import open_embeddings

    if (directory / "true.npy").exists():
        return np.load(directory / "corpus.npy", mmap_mode="r").shape
    vectors = np.concatenate(open_embeddings(embeddings).shards)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = np.random.default_rng(0).permutation(len(vectors))
    asked, corpus = vectors[rows[:queries]], vectors[np.sort(rows[queries:][:count])]
    del vectors
    true = [np.argpartition(-(corpus @ query), K)[:K] for query in asked]
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


def choose(directory: str, system: str, way: str) -> list[tuple[float, Setting, float]]:
    """Returns the quickest setting that reaches each recall of the curve, and its seconds."""
    queries, true = (np.load(Path(directory, f"{name}.npy"))[::2] for name in ("queries", "true"))
    if system in EXACT:
        return [(1, Setting(0, 0), 0)]
    if system in TREES:
        return tuned(directory, system, way, queries)
    index = opened(directory, system, way)
    found = []
    for target in CURVE:
        best, near = None, index.widest // 16
        first = len(index.again) // 2
        for order in (index.again[first::-1], index.again[first + 1 :]):
            for again in order:
                reached = functools.partial(reaches, index, queries, true, target, again)
                wide = fewest(reached, near=near, most=index.widest)
                if wide is None and order[0] == index.again[first]:
                    break  # fewer candidates reach even less recall
                if wide is None:
                    continue
                near, seconds = wide, timed(index, queries, Setting(wide, again), passes=2)
                if best is None or seconds < best[2]:
                    best = target, Setting(wide, again), seconds
                elif seconds > 1.25 * best[2]:
                    break
        found += [best] if best else []
    return found


def reaches(
    index: Opened, queries: np.ndarray, true: np.ndarray, target: float, again: int, wide: int
) -> bool:
    return share(index.answer(queries, wide, again), true) >= target


def tuned(directory: str, system: str, way: str, queries: np.ndarray) -> list[tuple[float, Setting, float]]:
    """Returns the settings that jaxir's tuner finds for each recall of the curve, with 0 as seconds."""
    from jaxir.retrieval.indexes.base_index import load_index
    from jaxir.retrieval.indexes.tuning import Trial, tune

    index = load_index(Path(directory, f"{system} {way}"))
    trial = Trial(np.load(Path(directory, "corpus.npy")), index.ids, similarity="cosine", queries=queries)
    found = []
    for target in CURVE:
        best, _ = tune(index, trial, target=target)
        if trial.recall(best, trial.tuning()) >= target:
            settings = best.info.settings
            found.append((target, Setting(settings["leaves_to_search"], settings["reorder"]), 0))
    return found


def fewest(reached: Callable[[int], bool], *, near: int, most: int) -> int | None:
    """Returns about (to 2 %) the least number, up to `most`, with which `reached` is true; None: none is."""
    # A copy of the tuner's search (jaxir.retrieval.indexes.tuning), because peers' Python may lack jaxir.
    low, high, number = 0, None, max(1, near)
    while high is None or high - low > max(1, 0.02 * high):
        if reached(number):
            high = number
        elif number == most:
            return None
        else:
            low = number
        if high is None:
            number = min(most, max(low + 1, round(1.3 * low)))
        else:
            number = min(high - 1, int(high / 1.3)) if low == 0 else (low + high) // 2
    return high


def share(found: list[list], true: np.ndarray) -> float:
    """Returns the recall of answers [Q, K]."""
    return sum(len(set(map(int, a)) & set(b)) for a, b in zip(found, true.tolist(), strict=True)) / true.size


def timed(index: Opened, queries: np.ndarray, setting: Setting, *, passes: int) -> float:
    """Returns the CPU time of all queries in one batch, the minimum over several passes."""
    least = float("inf")
    for _ in range(passes):
        started = time.process_time()
        index.answer(queries, *setting)
        least = min(least, time.process_time() - started)
    return least


def measure(directory: str, system: str, way: str, settings: str) -> dict:
    """Loads an index, and searches the second half of the queries with each of the settings."""
    queries, true = (np.load(Path(directory, f"{name}.npy"))[1::2] for name in ("queries", "true"))
    load_libraries(system)
    before = resident()
    index, points = opened(directory, system, way), []
    index.answer(queries, *Setting(*json.loads(settings)[0][1]))  # compiles programs and loads memory pages
    megabytes = resident() - before
    for target, (wide, again), _ in json.loads(settings):
        setting = Setting(wide, again)
        recall, seconds = (
            share(index.answer(queries, *setting), true),
            timed(index, queries, setting, passes=3),
        )
        one_by_one = []
        for _ in range(2):
            started = time.process_time()
            for n in range(SINGLE):
                index.answer(queries[n : n + 1], *setting)
            one_by_one.append(time.process_time() - started)
        rate, single = len(queries) / seconds, SINGLE / min(one_by_one)
        points.append(Point(recall, rate, single, way, setting, target))
    return {"points": points, "megabytes": megabytes}


def resident() -> float:
    """Returns the memory that this process holds, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3


def quickest(chosen: dict) -> dict:
    """Returns the fastest setting found for each system and target recall, over all ways of building it."""
    kept: dict[tuple[str, str], list] = {}
    for system, target in dict.fromkeys((key[0], f[0]) for key, found in chosen.items() for f in found):
        of_both = [
            (f[2], key, f)
            for key, found in chosen.items()
            for f in found
            if key[0] == system and f[0] == target
        ]
        _, key, found = min(of_both)
        kept.setdefault(key, []).append(found)
    return kept


def curves(chosen: dict, done: dict) -> dict[str, list[Point]]:
    """Returns each system's points (medians over repeats) by recall, without points that others beat."""
    points: dict[str, list[Point]] = {}
    for (system, way), settings in chosen.items():
        for n in range(len(settings)):
            of_all = [Point(*d["points"][n]) for d in done[system, way]]
            rate, single = (
                statistics.median(getattr(p, name) for p in of_all) for name in ("rate", "single")
            )
            setting = Setting(*of_all[0].setting)
            points.setdefault(system, []).append(
                of_all[0]._replace(rate=rate, single=single, setting=setting)
            )
    return {
        system: sorted(p for p in found if not any(o.recall > p.recall and o.rate > p.rate for o in found))
        for system, found in points.items()
    }


def at(points: list[Point], recall: float, name: str) -> float | None:
    """Returns the rate at a recall, interpolated between two points: log(rate) over log(1 - recall)."""
    if not points[0].recall <= recall <= points[-1].recall:
        return None
    x = [-math.log(max(1e-4, 1 - p.recall)) for p in points]
    return math.exp(np.interp(-math.log(1 - recall), x, [math.log(getattr(p, name)) for p in points]))


def report(systems: list[str], built: dict, points: dict[str, list[Point]], done: dict) -> None:
    """Prints the curves, each system's rate at equal recall, and ratios to the best peers."""
    print(f"\n{'':32} recall@10 wanted   found  queries/s  one by one  setting")
    for system, found in points.items():
        for p in found:
            print(
                f"{system:32} {p.target:16.3f} {p.recall:7.4f} {p.rate:10,.0f} {p.single:11,.0f}"
                f"  {p.way} {p.setting.wide}/{p.setting.again}"
            )
    for recall in EQUAL:
        print(f"\n{f'at recall@10 {recall}':32} queries/s  one by one  build s  disk MB  memory MB")
        rates: dict[str, tuple[float, float]] = {}
        for system in (s for s in systems if s not in EXACT and s in points):
            rate, single = (at(points[system], recall, name) for name in ("rate", "single"))
            if rate is None or single is None:
                print(f"{system:32} {'-':>9}")
                continue
            rates[system] = rate, single
            key = system, min(points[system], key=lambda p: abs(p.recall - recall)).way
            memory = statistics.median(d["megabytes"] for d in done[key])
            print(
                f"{system:32} {rate:9,.0f} {single:11,.0f} {built[key]['seconds']:8.1f}"
                f" {built[key]['megabytes']:8.0f} {memory:10.0f}"
            )
        for ours in (s for s in TREES if s in rates):
            for what, peers in (("graph", GRAPHS), ("fast-scan", CODES), ("ScaNN", ("ScaNN",))):
                if of_peers := [rates[peer] for peer in peers if peer in rates]:
                    ratios = [rates[ours][n] / max(peer[n] for peer in of_peers) for n in (0, 1)]
                    print(f"{ours}: {ratios[0]:.2f} of the best {what}'s, one by one {ratios[1]:.2f}")


def write_table(path: Path, points: dict[str, list[Point]]) -> None:
    """Writes the points of all curves."""
    rows = [(system, *p[:3], p.way, *p.setting) for system, found in points.items() for p in found]
    lines = ["\t".join(map(str, row)) for row in rows]
    path.write_text("\n".join(["system\trecall\trate\tsingle\tway\twide\tagain", *lines]) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
