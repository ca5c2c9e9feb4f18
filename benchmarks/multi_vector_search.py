"""Compares searches of token vectors: jaxir's maxsim index, PyLate's PLAID, and one-vector engines.

Each program builds its indexes and searches in its own process, on one core. Recall is the share of the ten
best passages by exact MaxSim that are found. PLAID's k-means gets as few points as jaxir's, because with
PyLate's default (256 points per centroid) its index takes hours on two cores. With --only=fde each text has
one vector of MUVERA (`encode --fde`): an engine finds 200 candidates, which MaxSim reranks.

  python -m jaxir.encode --model=MODEL --input=corpus.jsonl --output=EMB
  python -m jaxir.encode --model=MODEL --input=queries.jsonl --tower=query --output=QUERIES
  python benchmarks/multi_vector_search.py --embeddings=EMB --queries=QUERIES --peer_python=PEER/bin/python

PEER is an environment with pylate==1.6.* and the torch that its fast-plaid was built for (2.11).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CANDIDATES = (64, 128, 256, 512, 1024, 2048, 4096)
FDE = (1280, 2560, 5120, 10_240)  # numbers of components of a text's vector to compare
# PLAID's settings (n_ivf_probe, n_full_scores) to compare.
PROBES = ((4, 512), (8, 1024), (8, 4096), (16, 4096), (32, 8192))


def rows(directory: str, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float16 vectors [T, D] and lengths [N] of the first texts in an output of jaxir.encode."""
    names = sorted(Path(directory).glob("embeddings-*.npy"))
    lengths = np.concatenate([np.load(str(p).replace("embeddings-", "lengths-")) for p in names])[:most]
    return np.concatenate([np.load(p) for p in names])[: lengths.sum()], lengths


def split(vectors: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return [x.astype(np.float32) for x in np.split(vectors, np.cumsum(lengths)[:-1])]


def exact(given: dict) -> list[list[int]]:
    passages, lengths = (np.load(given["data"])[name] for name in ("passages", "lengths"))
    full = np.flatnonzero(lengths)
    starts = (np.cumsum(lengths) - lengths)[full]
    best = []
    for query in queries_of(given):
        scores = np.maximum.reduceat(passages.astype(np.float32) @ query.T, starts, axis=0).sum(1)
        best.append(full[np.argsort(-scores)[:10]].tolist())
    return best


def queries_of(given: dict) -> list[np.ndarray]:
    data = np.load(given["data"])
    return split(data["queries"], data["query_lengths"])


def size(directory: str) -> float:
    return sum(p.stat().st_size for p in Path(directory).rglob("*") if p.is_file()) / 1e6


def report(
    given: dict, name: str, build: float, megabytes: float, seconds: float, ids: list[list[int]]
) -> None:
    right = [len(set(a) & set(b)) / 10 for a, b in zip(ids, given["best"], strict=True)]
    row = {"system": name, "recall": np.mean(right), "queries per CPU s": len(ids) / seconds}
    print(json.dumps(row | {"build CPU s": build, "MB": megabytes}), flush=True)


def of_jaxir(given: dict) -> None:
    from types import SimpleNamespace

    from jaxir.retrieval.indexes.base_index import load_index
    from jaxir.retrieval.indexes.maxsim_index import MaxSimIndex

    data, queries = np.load(given["data"]), queries_of(given)
    about = {"similarity": "maxsim", "dimension": data["passages"].shape[1], "fingerprint": "-", "model": "-"}
    about |= {"tower": "passage", "step": None, "max_length": 512, "cut": None}
    ids = list(map(str, range(len(data["lengths"]))))
    stored = {"ids": ids, "shards": [data["passages"]], "lengths": [data["lengths"]]}
    stored = SimpleNamespace(info=SimpleNamespace(**about), **stored)
    for storage in ("4bit", "2bit"):
        started = time.process_time()
        MaxSimIndex.build(stored, token_storage=storage).save(f"{given['place']}/{storage}")
        build = time.process_time() - started
        index = load_index(f"{given['place']}/{storage}")
        index.search(queries[:10], 10)
        for candidates in CANDIDATES:
            index.info.settings["candidates"] = candidates
            started = time.process_time()
            found = index.search(queries, 10)[1]
            seconds = time.process_time() - started
            name = f"jaxir {storage}, {candidates} candidates"
            report(
                given,
                name,
                build,
                size(f"{given['place']}/{storage}"),
                seconds,
                [list(map(int, x)) for x in found],
            )


def of_fde(given: dict) -> None:
    from jaxir.retrieval.encoding.fixed_dimension import FixedDimension, fixed_dimensions
    from jaxir.retrieval.indexes.base_index import load_index
    from jaxir.retrieval.indexes.exact import ExactIndex
    from jaxir.retrieval.indexes.scann_index import ScannIndex

    data, queries = np.load(given["data"]), queries_of(given)
    tokens, lengths, of_queries = data["passages"], data["lengths"], data["query_lengths"]
    ends, ids = np.cumsum(lengths), list(map(str, range(len(lengths))))
    best = [set(row) for row in given["best"]]

    def reranked(query: np.ndarray, rows: list[int]) -> list[int]:
        some = [row for row in rows if lengths[row]]
        found = np.concatenate([tokens[ends[row] - lengths[row] : ends[row]] for row in some])
        starts = np.cumsum(lengths[some]) - lengths[some]
        scores = np.maximum.reduceat(found.astype(np.float32) @ query.T, starts, axis=0).sum(1)
        return [some[n] for n in np.argsort(-scores)[:10]]

    for dimension in FDE:
        how = FixedDimension.of(dimension, tokens.shape[1])
        started = time.process_time()
        vectors = fixed_dimensions(tokens.astype(np.float32), lengths, "passage", how)
        encoding = time.process_time() - started
        for engine, index_class in (("exact", ExactIndex), ("scann", ScannIndex)):
            place, started = f"{given['place']}/{engine}{dimension}", time.process_time()
            index_class.build(vectors, ids, similarity="dot").save(place)
            build = encoding + time.process_time() - started
            index = load_index(place)
            index.search(fixed_dimensions(queries[0], of_queries[:1], "query", how), 200)
            started = time.process_time()
            asked = fixed_dimensions(np.concatenate(queries), of_queries, "query", how)
            candidates = [list(map(int, row)) for row in index.search(asked, 200)[1]]
            found = [reranked(q, rows) for q, rows in zip(queries, candidates, strict=True)]
            seconds = time.process_time() - started
            kept = np.mean([len(b & set(rows)) / len(b) for b, rows in zip(best, candidates, strict=True)])
            name = f"fde {dimension}, {engine}, {kept:.3f} of the best among 200 candidates"
            report(given, name, build, size(place), seconds, found)


def of_pylate(given: dict) -> None:
    import torch
    from pylate import indexes

    torch.set_num_threads(1)
    data, queries = np.load(given["data"]), queries_of(given)
    passages = split(data["passages"], data["lengths"])
    for bits in (4, 2):
        how = {
            "index_folder": given["place"],
            "index_name": f"plaid{bits}",
            "nbits": bits,
            "kmeans_niters": 4,
        }
        how |= {"max_points_per_centroid": 16, "show_progress": False, "num_threads": 1}
        started = time.process_time()
        indexes.PLAID(**how, override=True).add_documents(list(map(str, range(len(passages)))), passages)
        build = time.process_time() - started
        for probes, scored in PROBES:
            index = indexes.PLAID(**how, n_ivf_probe=probes, n_full_scores=scored)
            index(queries[:10], k=10)
            started = time.process_time()
            found = index(queries, k=10)
            seconds = time.process_time() - started
            ids = [[int(hit["id"]) for hit in hits] for hits in found]
            name = f"PLAID {bits} bits, {probes} probes, {scored} scored"
            report(given, name, build, size(f"{given['place']}/plaid{bits}"), seconds, ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--embeddings", required=True)
    parser.add_argument("--queries", required=True)
    parser.add_argument("--peer_python")
    parser.add_argument("--passages", type=int, default=1_000_000, help="only the first passages")
    parser.add_argument("--most_queries", type=int, default=300)
    parser.add_argument("--only", choices=("jaxir", "fde", "pylate"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        passages, lengths = rows(arguments.embeddings, arguments.passages)
        queries, query_lengths = rows(arguments.queries, arguments.most_queries)
        given = {"place": place, "data": f"{place}/data.npz"}
        arrays = {
            "passages": passages,
            "lengths": lengths,
            "queries": queries,
            "query_lengths": query_lengths,
        }
        np.savez(given["data"], **arrays)
        given["best"] = exact(given)
        print(
            f"{len(lengths):,} passages, {len(passages):,} tokens, {len(query_lengths)} queries", flush=True
        )
        one = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        core = str(min(os.sched_getaffinity(0)))
        for python, child in (
            *((sys.executable, name) for name in ("jaxir", "fde")),
            (arguments.peer_python, "pylate"),
        ):
            if python is not None and arguments.only in (None, child):
                command = ["taskset", "-c", core, python, __file__, "--child", child]
                subprocess.run(command, input=json.dumps(given), text=True, env=one, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        {"jaxir": of_jaxir, "fde": of_fde, "pylate": of_pylate}[sys.argv[2]](json.load(sys.stdin))
    else:
        main()
