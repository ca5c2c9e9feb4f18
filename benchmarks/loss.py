"""Compares time and memory of a contrastive loss and its gradient: dense and blockwise.

Each batch size and version has its own process, on random unit vectors; one process runs at a time. The dense
version runs only if its compiled program fits into free memory. On several devices the batch is split over
all of them. Memory is that of one device. The compiler computes "arguments and results" and "temporary";
"peak" is measured (on a CPU for the whole process, Python and compiler included). CPU time is printed beside
wall time: on a machine that others use, trust a ratio to dense only if both times agree.

    python benchmarks/loss.py [--sizes=16384,32768,65536] [--dimension=768] [--block_size=1024]
                              [--loss=samtone|in_batch_softmax|pair] [--repeats=3]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

SIZES = {"cpu": "16384,32768,65536", "other": "16384,32768,65536,131072,262144,524288,1048576"}
BLOCK_SIZES = {"cpu": "1024", "other": "4096"}
MODULES = {"samtone": "samtone", "in_batch_softmax": "in_batch", "pair": "pair"}
# Number of products of [B, D] by [D, B] in the forward and backward pass, for the in-batch and the same-tower
# matrix. The blockwise version computes logits twice, but only half of a symmetric matrix.
PRODUCTS = {
    ("in_batch_softmax", "dense"): 3,
    ("in_batch_softmax", "blockwise"): 4,
    ("samtone", "dense"): 6,
    ("samtone", "blockwise"): 6,
    ("pair", "dense"): 6,
    ("pair", "blockwise"): 6,
}
COLUMNS = (
    "B",
    "version",
    "step s",
    "CPU s",
    "step / dense",
    "CPU / dense",
    "TFLOP/s",
    "temporary MiB",
    "arguments and results MiB",
    "peak MiB",
)
# A step is repeated until this many seconds have passed.
ENOUGH = 60.0


def main() -> int:
    """Parses flags, runs a process for each size and version, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--sizes", help=f"batch sizes (default: {SIZES['cpu']} on a CPU, else {SIZES['other']})"
    )
    parser.add_argument("--dimension", type=int, default=768, help="of the embeddings (default: 768)")
    parser.add_argument(
        "--block_size",
        help=f"rows and columns of a tile, or several numbers to compare (default: {BLOCK_SIZES['cpu']} on a "
        f"CPU, else {BLOCK_SIZES['other']})",
    )
    parser.add_argument("--loss", choices=MODULES, default="samtone", help="(default: samtone)")
    parser.add_argument(
        "--repeats", type=int, default=3, help=f"steps timed, fewer where they take {ENOUGH:g} s (default: 3)"
    )
    parser.add_argument("--worker", nargs=2, metavar=("SIZE", "BLOCK_SIZE"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        size, block_size = map(int, flags.worker)
        print(json.dumps(measure(size, flags.dimension, block_size or None, flags.loss, flags.repeats)))
        return 0

    about = json.loads(run([sys.executable, __file__, "--worker", "0", "0"]))
    kind = "cpu" if about["platform"] == "cpu" else "other"
    print(f"{flags.loss}, D = {flags.dimension}, float32, on {about['devices']} x {about['name']}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for size in map(int, (flags.sizes or SIZES[kind]).split(",")):
        results = {}
        for block_size in (0, *map(int, (flags.block_size or BLOCK_SIZES[kind]).split(","))):
            command = [sys.executable, __file__, f"--dimension={flags.dimension}", f"--loss={flags.loss}"]
            command += [f"--repeats={flags.repeats}", "--worker", str(size), str(block_size)]
            results[block_size] = result = json.loads(run(command))
            print(row(size, block_size, flags, result, results[0]), flush=True)
    return 0


def run(command: list[str]) -> str:
    """Runs a worker; returns its last line."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def row(size: int, block_size: int, flags: argparse.Namespace, result: dict, dense: dict) -> str:
    """Returns one line of the table."""
    cells = [f"{size:,}", f"blockwise, {block_size}" if block_size else "dense"]
    if "step" in result:
        products = PRODUCTS[flags.loss, "blockwise" if block_size else "dense"]
        rate = products * 2 * size**2 * flags.dimension / result["step"] / 1e12
        ratios = [f"{result[k] / dense[k]:.2f}" if "step" in dense else "" for k in ("step", "cpu")]
        cells += [f"{result['step']:.3g}", f"{result['cpu']:.3g}", *ratios, f"{rate:.3g}"]
    else:
        cells += ["does not fit", "", "", "", ""]
    cells += [f"{result[k] / 2**20:,.0f}" if k in result else "" for k in ("temporary", "arguments", "peak")]
    if "step" in result and "step" in dense and abs(result["loss"] - dense["loss"]) > 1e-5 * dense["loss"]:
        raise SystemExit(f"B = {size}: the losses differ: {result['loss']} and {dense['loss']} (dense)")
    return f"| {' | '.join(cells)} |"


def measure(size: int, dimension: int, block_size: int | None, name: str, repeats: int) -> dict:
    """Compiles the loss with its gradient in this process and times it; size 0 only returns the device."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import jax
    import jax.numpy as jnp

    from jaxir.runtime.partitioning import MeshConfig

    device = jax.local_devices()[0]
    if size == 0:
        return {"platform": device.platform, "name": device.device_kind, "devices": len(jax.devices())}
    loss = getattr(importlib.import_module(f"jaxir.losses.{MODULES[name]}"), name)
    partitioner = MeshConfig().build()
    rows = partitioner.sharding(("batch", None), (size, dimension))

    def loss_and_metrics(query: jax.Array, passage: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return loss(query, passage, block_size=block_size)

    with partitioner():
        shape = jax.ShapeDtypeStruct((size, dimension), jnp.float32, sharding=rows)
        step = jax.value_and_grad(loss_and_metrics, argnums=(0, 1), has_aux=True)
        compiled = jax.jit(step).lower(shape, shape).compile()
    memory = compiled.memory_analysis()
    result = {
        "temporary": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes + memory.output_size_in_bytes,
    }
    if result["temporary"] + result["arguments"] > free_memory(device):
        return result

    @functools.partial(jax.jit, out_shardings=rows)
    def unit(seed: int) -> jax.Array:
        # A pair has cosine 0.1; at D = 768 other texts have up to 0.16. So the task is neither solved nor
        # hopeless.
        shared, own = (jax.random.normal(jax.random.key(s), (size, dimension)) for s in (0, seed))
        x = shared / 3 + own
        return x / jnp.linalg.norm(x, axis=1, keepdims=True)

    query, passage = jax.block_until_ready((unit(1), unit(2)))
    walls: list[float] = []
    cpus: list[float] = []
    while not walls or (len(walls) < repeats and sum(walls) < ENOUGH):
        wall, cpu = time.perf_counter(), time.process_time()
        (value, _), _ = jax.block_until_ready(compiled(query, passage))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    stats = device.memory_stats() or {}
    peak = stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    times = {"step": statistics.median(walls), "cpu": statistics.median(cpus)}
    return result | times | {"loss": float(value), "peak": peak}


def free_memory(device: jax.Device) -> float:
    """Returns how many bytes a program may take on the device."""
    stats = device.memory_stats()
    if stats:
        return stats["bytes_limit"]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return math.inf
    available = next(x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable"))
    return 0.8 * int(available.split()[1]) * 1024


if __name__ == "__main__":
    raise SystemExit(main())
