"""Measures the way from a corpus file to a searchable index: documents per second, and time per stage.

jaxir does what `jaxir.encode` and `jaxir.index --backend=scann` do. The peer reads the same file, encodes
with sentence-transformers and builds faiss's HNSW index. Each run has its own process, timed from its start;
the systems take turns. jaxir's first run compiles its programs, and the second run finds them in the cache.

    python benchmarks/pipeline.py --corpus=FILE --peer_python=PYTHON [--documents=5000] [--repeats=2]

The peer needs sentence-transformers and faiss-cpu in the environment of --peer_python.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STAGES = ("start, model", "read, encode", "build", "write", "open, answer")
ALONE = ("reading alone", "tokenising alone", "compiling, CPU")
SYSTEMS = ("jaxir, first run", "jaxir", "peer")
HNSW_LINKS, HNSW_BUILD = 16, 200
QUESTION = "a program that converts images"


def main() -> int:
    """Parses flags, runs the systems in turns, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--corpus", help="a BEIR corpus.jsonl[.gz]")
    parser.add_argument("--documents", type=int, default=5000, help="how many of them, from the first on")
    parser.add_argument(
        "--model", default="st:all-MiniLM-L6-v2", help="st: and a local directory or hub name"
    )
    parser.add_argument("--repeats", type=int, default=2, help="processes of each system")
    parser.add_argument("--cores", type=int, help="how many cores (default: all that this process may use)")
    parser.add_argument(
        "--peer_python", default=sys.executable, help="has sentence-transformers and faiss-cpu"
    )
    parser.add_argument("--worker", nargs=3, metavar=("SYSTEM", "MODEL", "DIRECTORY"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        system, model, directory = flags.worker
        work = peer if system == "peer" else jaxir
        print(json.dumps(work(Clock(flags.started), model, Path(directory))))
        return 0
    if flags.corpus is None:
        parser.error("--corpus is needed")

    from jaxir.interop.hub import hub

    cores = sorted(os.sched_getaffinity(0))[: flags.cores]
    os.sched_setaffinity(0, cores)  # also limits all processes started from here on
    model = hub.resolve(flags.model.removeprefix("st:"), default_owner="sentence-transformers")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with (gzip.open if flags.corpus.endswith(".gz") else open)(flags.corpus, "rt") as file:
            lines = list(itertools.islice(file, flags.documents))
        (directory / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{len(lines):,} documents of {flags.corpus}, {len(cores)} cores", flush=True)
        runs: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
        for repeat in range(flags.repeats):
            for system in SYSTEMS:
                python = flags.peer_python if system == "peer" else sys.executable
                runs[system].append(run(system, python, str(Path(model).resolve()), directory, repeat))
        report(len(lines), runs)
    return 0


def run(system: str, python: str, model: str, directory: Path, repeat: int) -> dict[str, float]:
    """Runs one system in its own process and its own directory."""
    own = directory / f"{system} {repeat}"
    own.mkdir()
    # Each repeat has its own cache, so its first run compiles all programs and its second run compiles none.
    cache = {"XDG_CACHE_HOME": str(directory / f"kept-{repeat}"), "JAX_PLATFORMS": "cpu"}
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [python, str(Path(__file__).resolve()), "--worker", system, model, str(own)]
    command.append(f"--started={time.time()}")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | cache | offline)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    total = sum(result[stage] for stage in STAGES)
    print(f"  repeat {repeat + 1}, {system}: {total:.1f} s", flush=True)
    return result | {"total": total}


class Clock:
    """Seconds from one call to the next."""

    def __init__(self, started: float):
        self._last = started

    def __call__(self) -> float:
        last, self._last = self._last, time.time()
        return self._last - last


def jaxir(clock: Clock, model: str, directory: Path) -> dict[str, float]:
    """Encodes and indexes as the commands do."""
    from jaxir.runtime.compile_cache import keep_compiled_programs

    keep_compiled_programs()
    import jax

    from jaxir import DualEncoder, load_index
    from jaxir.data.formats.sources import read_corpus
    from jaxir.retrieval.encoding.embeddings import encode_corpus
    from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
    from jaxir.retrieval.indexes.base_index import build_index

    compiling: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiling.append(seconds) if "backend_compile" in event else None
    )
    corpus, times = directory.parent / "corpus.jsonl", {}
    encoder = DualEncoder.load(f"st:{model}")
    times["start, model"] = clock()
    encode_corpus(encoder, corpus, directory / "embeddings")
    times["read, encode"] = clock()
    index = build_index(open_embeddings(directory / "embeddings"), backend="scann")
    times["build"] = clock()
    index.save(directory / "index", corpus=corpus)
    times["write"] = clock()
    load_index(directory / "index").search(encoder.encode_queries([QUESTION]), 10)
    times["open, answer"] = clock()
    texts = [document.contents for document in read_corpus(corpus)]
    times["reading alone"] = clock()
    encoder.tokenizer.encode_batch(texts, max_length=encoder.text_settings("passage")[1])
    times["tokenising alone"] = clock()
    return times | {"compiling, CPU": sum(compiling)}


def peer(clock: Clock, model: str, directory: Path) -> dict[str, float]:
    """Encodes with sentence-transformers' defaults, and indexes with faiss."""
    import faiss
    import torch
    from sentence_transformers import SentenceTransformer

    threads, times = len(os.sched_getaffinity(0)), {}
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    encoder = SentenceTransformer(model, device="cpu")
    times["start, model"] = clock()
    with (directory.parent / "corpus.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    texts = [f"{r['title']} {r['text']}".strip() for r in records]
    vectors = encoder.encode(texts, show_progress_bar=False, normalize_embeddings=True)
    times["read, encode"] = clock()
    index = faiss.IndexHNSWFlat(vectors.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_BUILD
    index.add(vectors)
    times["build"] = clock()
    faiss.write_index(index, str(directory / "index"))
    (directory / "documents.json").write_text(json.dumps(records), encoding="utf-8")
    times["write"] = clock()
    asked = encoder.encode([QUESTION], show_progress_bar=False, normalize_embeddings=True)
    faiss.read_index(str(directory / "index")).search(asked, 10)
    times["open, answer"] = clock()
    return times


def report(documents: int, runs: dict[str, list[dict[str, float]]]) -> None:
    """Prints the medians of each system's stages, documents per second, and its speed as a ratio."""
    print(
        f"\nseconds, medians of {len(runs['peer'])} processes{'':15}" + "".join(f"{s:>18}" for s in SYSTEMS)
    )
    for stage in (*STAGES, "total"):
        middle = [statistics.median(run[stage] for run in runs[system]) for system in SYSTEMS]
        print(f"{stage:48}" + "".join(f"{seconds:18.1f}" for seconds in middle))
    totals = [statistics.median(run["total"] for run in runs[system]) for system in SYSTEMS]
    print(f"{'documents a second':48}" + "".join(f"{documents / total:18.1f}" for total in totals))
    print(f"{'speed of the peer':48}" + "".join(f"{totals[-1] / total:17.2f}x" for total in totals))
    print("\nwithin jaxir's, beside other work or before it:")
    for stage in ALONE:
        middle = [statistics.median(run[stage] for run in runs[system]) for system in SYSTEMS[:2]]
        print(f"{stage:48}" + "".join(f"{seconds:18.1f}" for seconds in middle))


if __name__ == "__main__":
    raise SystemExit(main())
