"""Compares encoding throughput on a CPU with sentence-transformers: same model, texts, cores and type.

Each system has its own process. The processes run one at a time, in turns. A process encodes all texts twice:
the first pass includes jaxir's compilation, the second does not. Three systems are compared:

    jaxir               batches of a token budget, from texts sorted by tokens
    peer                sentence-transformers with its defaults: batches of 32, sorted by characters
    peer, token-sorted  sentence-transformers given batches of 32 sorted by tokens

    python benchmarks/encode.py --peer_python=PYTHON [--corpus=FILE] [--texts=2000] [--repeats=3] [--cores=2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SYSTEMS = ("peer", "peer, token-sorted", "jaxir")
PEER_BATCH = 32
PASSES = ("with compiling (first pass)", "without (second pass)")


def main() -> int:
    """Parses flags, runs the systems in turns, prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", default="st:all-MiniLM-L6-v2", help="st: and a local directory or hub name"
    )
    parser.add_argument("--corpus", help="a BEIR corpus.jsonl[.gz] (default: installed Python documentation)")
    parser.add_argument("--texts", type=int, default=2000, help="how many texts, drawn at random (seed 0)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each system")
    parser.add_argument("--cores", type=int, help="how many cores (default: all that this process may use)")
    parser.add_argument(
        "--peer_python", default=sys.executable, help="an interpreter with sentence-transformers"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--worker", nargs=4, metavar=("SYSTEM", "MODEL", "DTYPE", "DIRECTORY"), help=argparse.SUPPRESS
    )
    flags = parser.parse_args()
    if flags.worker:
        return work(*flags.worker)

    cores = sorted(os.sched_getaffinity(0))[: flags.cores]
    os.sched_setaffinity(0, cores)  # processes started from here on inherit it
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        texts = load_texts(flags.corpus, flags.texts)
        (directory / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        source = flags.corpus or "installed Python documentation"
        print(f"{len(texts)} texts of {source}, {len(cores)} cores, {flags.dtype}")
        runs: dict[str, list[dict]] = {system: [] for system in SYSTEMS}
        for repeat in range(flags.repeats):
            for system in SYSTEMS:
                run = run_worker(system, flags.model, flags.dtype, directory, flags.peer_python)
                runs[system].append(run)
                times = " then ".join(f"{p['wall']:.1f} s ({p['cpu']:.1f} s of CPU)" for p in run["passes"])
                print(f"  repeat {repeat + 1}, {system}: {times}", flush=True)
        report(texts, runs, directory)
    return 0


def load_texts(corpus: str | None, count: int) -> list[str]:
    """Draws `count` texts at random."""
    if corpus is not None:
        from jaxir.data.formats.sources import read_corpus

        texts = [document.contents for document in read_corpus(corpus)]
    else:
        from jaxir.data.sets import package_docs

        texts = [entry.document.contents for entry in package_docs.collect()]
    random.Random(0).shuffle(texts)
    return texts[:count]


def run_worker(system: str, model: str, dtype: str, directory: Path, peer_python: str) -> dict:
    """Runs one system in its own process, which writes its vectors into `directory`."""
    python = sys.executable if system == "jaxir" else peer_python
    worker = ["--worker", system, local_model(model), dtype, str(directory)]
    command = [python, str(Path(__file__).resolve()), *worker]
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "true",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(
            f"{system} failed:\n{done.stderr[-2000:]}\n(--peer_python names the peer's interpreter)"
        )
    return json.loads(done.stdout.splitlines()[-1])


def local_model(model: str) -> str:
    """Returns the directory of a sentence-transformers model, for both systems to read."""
    from jaxir.interop.hub import hub

    return str(Path(hub.resolve(model.removeprefix("st:"), default_owner="sentence-transformers")).resolve())


def work(system: str, model: str, dtype: str, directory: str) -> int:
    """Encodes all texts twice in this process; prints times as JSON."""
    import numpy as np

    texts = json.loads((Path(directory) / "texts.json").read_text(encoding="utf-8"))
    result: dict = {"passes": []}
    encode = jaxir_encoder(model, dtype, result) if system == "jaxir" else peer_encoder(model, dtype, system)
    for _ in PASSES:
        wall, cpu = time.perf_counter(), time.process_time()
        vectors = encode(texts)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        result["passes"].append({"wall": wall, "cpu": cpu})
    np.save(Path(directory) / f"{system}.npy", vectors)
    print(json.dumps(result))
    return 0


def jaxir_encoder(model: str, dtype: str, result: dict) -> Callable:
    """Loads jaxir's encoder; adds the counts of tokens and the shapes of batches to `result`."""
    from jaxir import DualEncoder
    from jaxir.retrieval.encoding.batching import EncodingReport

    encoder = DualEncoder.load(f"st:{model}", dtype=dtype)
    prompt, max_length = encoder.text_settings("passage")

    def encode(texts: Sequence[str]):
        report = EncodingReport()
        vectors = encoder.encode(texts, tower="passage", show_progress=False, report=report)
        result.update(padding=report.padding_ratio, shapes=len(report.shapes))
        if "counts" not in result:
            tokens = encoder.tokenizer.encode_batch([prompt + text for text in texts], max_length=max_length)
            result["counts"] = [len(t) for t in tokens]
        return vectors

    return encode


def peer_encoder(model: str, dtype: str, system: str) -> Callable:
    """Loads sentence-transformers."""
    import numpy as np
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    peer = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    if system == "peer":
        return lambda texts: peer.encode(texts, batch_size=PEER_BATCH, show_progress_bar=False)

    def encode(texts: Sequence[str]):
        ids = peer.tokenizer(texts, truncation=True, max_length=peer.max_seq_length)["input_ids"]
        order = np.argsort([-len(row) for row in ids], kind="stable")
        out = np.empty([len(texts), peer.get_sentence_embedding_dimension()], np.float32)
        for at in range(0, len(order), PEER_BATCH):
            batch = order[at : at + PEER_BATCH]
            out[batch] = peer.encode(
                [texts[i] for i in batch], batch_size=PEER_BATCH, show_progress_bar=False
            )
        return out

    return encode


def report(texts: Sequence[str], runs: dict[str, list[dict]], directory: Path) -> None:
    """Prints a table of medians over repeats for each pass, and whether the systems' vectors agree."""
    import numpy as np

    counts = runs["jaxir"][0]["counts"]
    padding = {
        "peer": peer_padding(sorted(range(len(texts)), key=lambda i: -len(texts[i])), counts),
        "peer, token-sorted": peer_padding(sorted(range(len(texts)), key=lambda i: -counts[i]), counts),
        "jaxir": runs["jaxir"][0]["padding"],
    }
    print(f"\n{sum(counts)} tokens, median {statistics.median(counts):g} a text; jaxir compiled", end=" ")
    print(f"{runs['jaxir'][0]['shapes']} shapes; medians of {len(runs['jaxir'])} processes each")
    for number, what in enumerate(PASSES):
        print(f"\n{what:28}  wall s   CPU s  texts/s  padded/real  speed by wall  by CPU")
        for system in SYSTEMS:
            passes = [run["passes"][number] for run in runs[system]]
            wall, cpu = (statistics.median(p[key] for p in passes) for key in ("wall", "cpu"))
            ratios = [
                statistics.median(
                    peer["passes"][number][key] / own[key]
                    for peer, own in zip(runs["peer"], passes, strict=True)
                )
                for key in ("wall", "cpu")
            ]
            print(
                f"{system:28} {wall:7.1f} {cpu:7.1f} {len(texts) / wall:8.1f} {padding[system]:12.2f}"
                f" {ratios[0]:13.2f}x {ratios[1]:6.2f}x"
            )
    vectors = {system: np.load(directory / f"{system}.npy") for system in SYSTEMS}
    difference = np.abs(vectors["jaxir"] - vectors["peer"]).max()
    print(f"\nlargest difference between jaxir's and the peer's vectors: {difference:.1e}")


def peer_padding(order: Sequence[int], counts: Sequence[int]) -> float:
    """Returns padded / real tokens, for batches of 32 texts in `order`, each padded to its longest text."""
    batches = [[counts[i] for i in order[at : at + PEER_BATCH]] for at in range(0, len(order), PEER_BATCH)]
    return sum(len(batch) * max(batch) for batch in batches) / sum(counts)


if __name__ == "__main__":
    raise SystemExit(main())
