"""`jaxir.encode` in processes that tests kill, of one device each."""

import os
import subprocess
import sys
import time
from pathlib import Path

SHARD, COUNT = 8, 1201


def encode(folder: Path, model: str, output: str, *flags: str, **environment: str) -> subprocess.Popen:
    """Encodes corpus.jsonl of a folder; what the process prints goes to OUTPUT.log."""
    command = [sys.executable, "-m", "jaxir.encode", f"--model={model}", "--input=corpus.jsonl"]
    command += [f"--output={output}", f"--shard_size={SHARD}", *flags]
    env = os.environ | {"XLA_FLAGS": ""} | environment  # without the XLA flags of the tests, as users run it
    with (folder / f"{output}.log").open("a") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


def shards(directory: Path) -> list[int]:
    return [int(path.stem[-5:]) for path in directory.glob("embeddings-*.npy")]


def wait_for_shards(process, directory: Path, count: int, numbered=lambda number: True) -> None:
    deadline = time.monotonic() + 300
    while len([*filter(numbered, shards(directory))]) < count:
        assert process.poll() is None, directory.with_suffix(".log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
