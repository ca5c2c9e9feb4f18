"""Measures CPU seconds from a process's start to its first result: a vector, or the answer to a question.

    python benchmarks/starts.py [--peer_python=PYTHON] [--repeats=3]
    python benchmarks/starts.py --corpus=FILE [--texts=1000] [--dtype=bfloat16] ...

Each process runs alone, in turns with `import jax` and with sentence-transformers, which loads the same
folder. Programs and bytecode are compiled before the first round, into a cache of this script. With --corpus,
processes that encode many texts take turns: jaxir with an empty cache, jaxir with that of the process before,
and sentence-transformers. Nothing is downloaded. CPU time counts all threads; wall time is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VECTOR = 'from jaxir import DualEncoder; DualEncoder.load("st:all-MiniLM-L6-v2").encode("a text")'
PEER = (
    "import sys; from sentence_transformers import SentenceTransformer;"
    ' SentenceTransformer(sys.argv[1], device="cpu").encode("a text")'
)
TEXTS = "import json, sys; texts = json.load(open(sys.argv[2])); "
ENCODE = (
    f"{TEXTS}from jaxir import DualEncoder;"
    ' DualEncoder.load("st:" + sys.argv[1], dtype=sys.argv[3]).encode(texts, show_progress=False)'
)
PEER_ENCODE = (
    f"{TEXTS}import torch; from sentence_transformers import SentenceTransformer;"
    ' how = {"dtype": getattr(torch, sys.argv[3])};'
    ' SentenceTransformer(sys.argv[1], device="cpu", model_kwargs=how).encode(texts)'
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--peer_python", help="an interpreter with sentence-transformers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--corpus", help="a BEIR corpus.jsonl[.gz], whose texts are encoded")
    parser.add_argument("--texts", type=int, default=1000, help="how many texts, drawn at random (seed 0)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"XDG_CACHE_HOME": directory, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
        os.environ["PYTHONPYCACHEPREFIX"] = f"{directory}/bytecode"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        measure = encode_texts if flags.corpus else start
        found = measure(flags, Path(directory))
    first = statistics.median(cpu for cpu, _ in next(iter(found.values())))
    print(f"| process | CPU s | wall s | of {next(iter(found))} |\n|---|---:|---:|---:|")
    for name, pairs in found.items():
        cpu, wall = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {name} | {cpu:.2f} | {wall:.2f} | {cpu / first:.2f} |")


def encode_texts(flags: argparse.Namespace, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Returns (CPU seconds, wall seconds) of processes that encode many texts."""
    from encode import load_texts

    from jaxir.interop.hub.hub import local_minilm

    file = directory / "texts.json"
    file.write_text(json.dumps(load_texts(flags.corpus, flags.texts)))
    arguments = [str(local_minilm().resolve()), str(file), flags.dtype]
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(flags.repeats):
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # names the directory of this process
        os.environ["XDG_CACHE_HOME"] = str(directory / f"cache{number}")
        systems = {
            "jaxir with an empty cache": [sys.executable, "-c", ENCODE],
            "jaxir again": [sys.executable, "-c", ENCODE],
        }
        if flags.peer_python:
            systems["sentence-transformers"] = [flags.peer_python, "-c", PEER_ENCODE]
        for name, command in systems.items():
            found.setdefault(name, []).append(run([*command, *arguments]))
    return found


def start(flags: argparse.Namespace, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Returns (CPU seconds, wall seconds) of processes that give one result."""
    from jaxir.interop.hub.hub import local_minilm

    own = [sys.executable, "-m"]
    corpus, vectors, index = (str(directory / name) for name in ("corpus.jsonl", "vectors", "index"))
    texts = [{"_id": str(n), "title": "", "text": f"text number {n}"} for n in range(100)]
    Path(corpus).write_text("\n".join(map(json.dumps, texts)))
    model = "--model=st:all-MiniLM-L6-v2"
    run([*own, "jaxir.encode", model, f"--input={corpus}", f"--output={vectors}"])
    run([*own, "jaxir.index", f"--embeddings={vectors}", f"--output={index}", "--backend=exact"])
    systems = {
        "import jax": [sys.executable, "-c", "import jax"],
        "jaxir, a vector": [sys.executable, "-c", VECTOR],
        "jaxir.search, a question": [*own, "jaxir.search", f"--index={index}", "--query=a text"],
    }
    if flags.peer_python:
        systems["sentence-transformers, a vector"] = [flags.peer_python, "-c", PEER, str(local_minilm())]
    for command in systems.values():  # start each once first, to compile programs and fill the file cache
        run(command)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(flags.repeats):
        for name, command in systems.items():
            found[name].append(run(command))
    return found


def run(command: list[str]) -> tuple[float, float]:
    """Runs a command; returns its CPU seconds and wall seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


if __name__ == "__main__":
    main()
