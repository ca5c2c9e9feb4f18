"""Compares batches from memory and from records on a disk: examples/s, and how long a step waits.

The same random pairs are read from memory (`ArrayDataset`) and from ArrayRecord files by Grain
(`GrainRecords`). Each source runs in its own process, which starts without its files in the system's cache.
The figures "ahead" are for batches taken as fast as training's own thread takes them. Then the process sleeps
for `--step_ms` after each batch, like a host whose accelerator computes.

    python benchmarks/batches.py [--pairs=200000] [--batch_size=1024] [--step_ms=100] [--repeats=3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SOURCES = ("memory", "records")
FIGURES = {
    "open_s": "open, s",
    "first_s": "first batch, s",
    "ahead": "examples/s, ahead",
    "cpu_us": "CPU us an example, ahead",
    "wait_ms": "a step waits, ms",
    "grown_mib": "memory grown, MiB",
}
STEPS_AHEAD, STEPS_WAITED = 100, 40


class RandomIds:
    """A tokenizer that gives a text random ids, always the same: 20 for a query and 100 for a passage."""

    vocab_size, fingerprint = 30_522, "random"

    def encode_batch(self, texts: list[str], *, max_length: int, truncation: Any = None) -> list[np.ndarray]:
        """Returns the ids of each text, at most `max_length`, and on average a sixth fewer."""
        rngs = [np.random.default_rng(zlib.crc32(text.encode())) for text in texts]
        sizes = [rng.integers(2 * max_length // 3, max_length + 1) for rng in rngs]
        return [
            rng.integers(1, self.vocab_size, size).astype(np.int32)
            for rng, size in zip(rngs, sizes, strict=True)
        ]


def main() -> int:
    """Parses flags, runs the sources in turns, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--step_ms", type=float, default=100)
    parser.add_argument("--threads", type=int, default=4, help="of GrainRecords")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each source")
    parser.add_argument("--worker", nargs=2, metavar=("SOURCE", "DIRECTORY"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        source, directory = flags.worker
        print(json.dumps(measured(source, Path(directory), flags)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(directory, flags.pairs)
        sizes = {p.name: sum(f.stat().st_size for f in p.iterdir()) / 2**20 for p in directory.iterdir()}
        print(f"{flags.pairs:,} pairs, {', '.join(f'{n} {s:,.0f} MiB' for n, s in sorted(sizes.items()))}")
        runs: dict[str, list[dict[str, float]]] = {source: [] for source in SOURCES}
        for _ in range(flags.repeats):
            for source in SOURCES:
                runs[source].append(run(source, directory))
    print(f"{'medians':28}" + "".join(f"{source:>16}" for source in SOURCES))
    for figure, title in FIGURES.items():
        middle = [statistics.median(one[figure] for one in runs[source]) for source in SOURCES]
        print(f"{title:28}" + "".join(f"{value:16,.2f}" for value in middle))
    return 0


def features() -> Any:
    """Returns the features of pairs of 24 + 120 tokens."""
    from jaxir.core.features import TextFormat
    from jaxir.objectives.pair_batch import pair_features

    return pair_features(TextFormat(query_length=24, passage_length=120))


def records(pairs: int) -> Iterator[dict[str, Any]]:
    """Yields the pairs."""
    for i in range(pairs):
        yield {"query": (f"q{i}", f"q{i}"), "passage": (f"p{i}", f"p{i}"), "negatives": []}


def write(directory: Path, pairs: int) -> None:
    """Writes the pairs as records."""
    from jaxir.data.batches.record_files import write_records

    write_records(directory / "records", records(pairs), RandomIds(), features())


def run(source: str, directory: Path) -> dict[str, float]:
    """Measures one source in a new process."""
    for path in directory.glob("*/*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    done = subprocess.run([*command, "--worker", source, str(directory)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{source} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"  {source}: {found['ahead']:,.0f} examples/s, {found['cpu_us']:.1f} CPU us each", flush=True)
    return found


def measured(source: str, directory: Path, flags: argparse.Namespace) -> dict[str, float]:
    """Returns the figures of a source."""
    from jaxir.data.batches.array_dataset import ArrayDataset
    from jaxir.data.batches.grain_records import RecordDataset
    from jaxir.training.step.prefetch import prefetch

    if source == "records":
        import grain  # noqa: F401, before the clock and the memory are looked at
    before, began = _peak(), time.perf_counter()
    if source == "records":
        data = RecordDataset(directory / "records", features(), threads=flags.threads)
    else:
        data = ArrayDataset.from_records(records(flags.pairs), RandomIds(), features())
    found = {"open_s": time.perf_counter() - began}
    began = time.perf_counter()
    with prefetch(data.batches(batch_size=flags.batch_size, seed=0), lambda batch: batch) as batches:
        next(batches)
        found["first_s"], began, cpu = time.perf_counter() - began, time.perf_counter(), time.process_time()
        for _ in itertools.islice(batches, STEPS_AHEAD):
            pass
        examples = STEPS_AHEAD * flags.batch_size
        found["ahead"] = examples / (time.perf_counter() - began)
        found["cpu_us"] = (time.process_time() - cpu) / examples * 1e6
        waits = []
        for _ in range(STEPS_WAITED):
            time.sleep(flags.step_ms / 1000)
            began = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - began)
    found["wait_ms"] = statistics.mean(waits) * 1000
    return found | {"grown_mib": _peak() - before}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    raise SystemExit(main())
