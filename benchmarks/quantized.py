"""Measures what quantised weights cost and save for one model: bytes, nDCG@10 and encoding speed on a CPU.

    python benchmarks/quantized.py --data=beir/cacm --data=beir/med [--model=MODEL] [--way=int8 ...]

Each way of storing the weights encodes the same texts, in turns, so that speed ratios are valid even if the
machine has other work. The first pass, which compiles, is not timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxir import DualEncoder
from jaxir.core.errors import UserError
from jaxir.evaluation.collection import Collection, evaluate_collection, read_collection

WAYS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weights": "int8"},
    "int8, bfloat16": {"weights": "int8", "dtype": "bfloat16"},
    "nf4": {"weights": "nf4"},
    "nf4, bfloat16": {"weights": "nf4", "dtype": "bfloat16"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="st:all-MiniLM-L6-v2")
    parser.add_argument("--data", action="append", required=True, help="a BEIR folder with a test split")
    parser.add_argument("--texts", type=int, default=200, help="passages of the last folder that are timed")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--way", action="append", choices=WAYS, help="beside float32 (default: all)")
    flags = parser.parse_args()
    ways = ["float32", *(flags.way or list(WAYS)[1:])]
    encoders = {name: DualEncoder.load(flags.model, **WAYS[name]) for name in ways}
    collections = {Path(path).name: read_collection(path) for path in flags.data}
    print(f"| {flags.model} | MB | cosine | {' | '.join(collections)} | speed |")
    print("|---" * (4 + len(collections)) + "|")
    texts = list(collections.values())[-1].documents[: flags.texts]
    vectors = {
        name: encoder.encode_passages(texts, show_progress=False) for name, encoder in encoders.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(flags.passes):
        for name, encoder in encoders.items():
            started = time.perf_counter()
            encoder.encode_passages(texts, show_progress=False)
            seconds[name].append(time.perf_counter() - started)
    fastest = {name: min(times) for name, times in seconds.items()}
    for name, encoder in encoders.items():
        size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(encoder.model, nnx.Param)))
        cosine = np.sum(vectors[name] * vectors["float32"], axis=1).mean()
        found = [f"{ndcg(encoder, collection):.4f}" for collection in collections.values()]
        ratio = fastest["float32"] / fastest[name]
        print(f"| {name} | {size / 1e6:.1f} | {cosine:.4f} | {' | '.join(found)} | {ratio:.2f} |", flush=True)
    return 0


def ndcg(encoder: DualEncoder, collection: Collection) -> float:
    return evaluate_collection(encoder, collection, "nDCG@10").values["nDCG@10"]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
