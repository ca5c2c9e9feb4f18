"""Compares searches of a sparse encoder's token weights: jaxir's inverted index and Lucene's impact index.

Both get the same weights; for Lucene they are multiplied by 100 and rounded. Recall is the share of the first
ten documents whose exact float32 product is among the ten largest, ties included. CPU time counts all
threads. For Lucene it counts this process and the sidecar, after three searches of all queries that warm Java
up.

  python benchmarks/sparse_search.py --model=RUN --corpus=corpus.jsonl --queries=queries.jsonl

Texts are encoded once, and their weights are kept in --work.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import sparse

from jaxir import SparseEncoder
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import read_corpus, read_queries
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.lucene_index import build_impact_index
from jaxir.retrieval.indexes.sparse_index import SparseIndex
from jaxir.sidecar.environment import shared
from jaxir.storage.temporary_outputs import temporary_directory

SCALE, K, REPEATS = 100, 10, 3
ROUNDING = 1e-5  # relative error of float32 products, within which scores are tied
TICKS = os.sysconf("SC_CLK_TCK")  # units of CPU time in /proc per second


def encoded(arguments: argparse.Namespace) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
    """Returns the weights of the documents and of the queries."""
    work = Path(arguments.work)
    work.mkdir(parents=True, exist_ok=True)
    files = [work / f"{name}.npz" for name in ("passages", "queries")]
    if not all(file.exists() for file in files):
        encoder, stop = SparseEncoder.load(arguments.model), OnBadInput("stop")
        documents = [d.contents for d in read_corpus(arguments.corpus, stop)][: arguments.documents]
        queries = [q.text for q in read_queries(arguments.queries, stop)][: arguments.most_queries]
        for file, texts, tower in zip(files, (documents, queries), ("passage", "query"), strict=True):
            sparse.save_npz(file, encoder.encode(texts, tower=tower))
    passages, queries = (sparse.load_npz(file) for file in files)
    return largest(passages, arguments.passage_dims), largest(queries, arguments.query_dims)


def largest(weights: sparse.csr_matrix, count: int | None) -> sparse.csr_matrix:
    """Returns the `count` largest weights of each row."""
    if count is None:
        return weights
    kept = weights.copy()
    for start, end in zip(kept.indptr, kept.indptr[1:], strict=False):
        kept.data[start:end][np.argsort(-kept.data[start:end], kind="stable")[count:]] = 0.0
    kept.eliminate_zeros()
    return kept


def whole(weights: sparse.csr_matrix) -> list[dict[str, int]]:
    """Returns each row as {token: weight times SCALE, rounded}; a token's name is its column."""
    rows = []
    for row in weights:
        values = np.rint(SCALE * row.data).astype(int)
        rows.append({f"t{i}": int(v) for i, v in zip(row.indices, values, strict=True) if v})
    return rows


def cpu_seconds(pid: int | None) -> float:
    """Returns the CPU time of this process plus that of process `pid`, all threads included."""
    if pid is None:
        return time.process_time()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / TICKS


def measure(
    name: str,
    search: Callable[[], tuple[np.ndarray, list[list[str]]]],
    scores: np.ndarray,
    build: float,
    directory: Path,
    pid: int | None = None,
) -> None:
    """Prints a row of the table; `scores` [Q, N] are the exact products."""
    for _ in range(REPEATS):
        _, ids = search()
    started, clock = cpu_seconds(pid), time.perf_counter()
    for _ in range(REPEATS):
        search()
    seconds, elapsed = cpu_seconds(pid) - started, time.perf_counter() - clock
    recall = []
    for found, row in zip(ids, scores, strict=True):
        tenth = np.partition(row, -K)[-K]
        recall.append(np.mean(row[[int(i) for i in found]] >= tenth * (1 - ROUNDING)))
    count = REPEATS * len(scores)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6
    figures = f"{np.mean(recall):.4f} | {count / seconds:,.0f} | {count / elapsed:,.0f}"
    print(f"| {name} | {figures} | {build:.1f} | {size:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--queries", required=True)
    parser.add_argument("--work", default="sparse_search", help="directory of the encoded weights")
    parser.add_argument("--documents", type=int, default=1_000_000, help="only the first documents")
    parser.add_argument("--most_queries", type=int, default=200)
    parser.add_argument("--passage_dims", type=int, help="only the largest weights of a document")
    parser.add_argument("--query_dims", type=int, help="only the largest weights of a query")
    arguments = parser.parse_args()
    passages, queries = encoded(arguments)
    scores = (queries @ passages.T).toarray()
    counts = [x.nnz / x.shape[0] for x in (passages, queries)]
    what = f"{passages.shape[0]:,} documents of {counts[0]:.0f} weights"
    print(f"{what}, {len(scores)} queries of {counts[1]:.0f}", flush=True)
    print("| index | recall@10 | queries a CPU second | queries a second | building, CPU s | MB |")
    print("|---|---:|---:|---:|---:|---:|")
    ids = [f"{i}" for i in range(passages.shape[0])]
    with temporary_directory() as place:
        for storage in ("float32", "int8"):
            started = time.process_time()
            SparseIndex.build(passages, ids, storage=storage).save(place / storage)
            build, index = time.process_time() - started, load_index(place / storage)
            measure(f"jaxir, {storage}", lambda: index.search(queries, K), scores, build, place / storage)  # noqa: B023
        sidecar, given = shared(), whole(queries)
        sidecar.ping()
        started = cpu_seconds(sidecar.pid)
        impact = build_impact_index(dict(zip(ids, whole(passages), strict=True)), place / "impact")
        build = cpu_seconds(sidecar.pid) - started
        measure(
            "Lucene's impact index",
            lambda: impact.search(given, K),
            scores,
            build,
            place / "impact",
            sidecar.pid,
        )


if __name__ == "__main__":
    main()
