"""Compares MaxSim and its gradient computed by blocks with all similarities at once: memory and time.

    python benchmarks/maxsim.py [--pairs=512,4096] [--tokens=32,180] [--dimension=128] [--block_size=N]
                                [--timed=64] [--repeats=5]

Every query is compared with every passage. Temporary memory is the compiler's figure for this machine, and
matrix products are counted in the program: batches of `--pairs` are compiled but not run. With `--timed`
pairs both versions run in turns, and the ratio of their CPU times is printed.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxir import losses
from jaxir.costs import work


def dense(queries: Any, query_mask: Any, passages: Any, passage_mask: Any) -> jax.Array:
    """Computes `losses.maxsim` from all similarities [Q, P, Lq, Lp]."""
    found = jnp.einsum("qsd,ptd->qpst", queries, passages, precision="highest")
    largest = jnp.where(passage_mask[None, :, None], found, -jnp.inf).max(-1)
    return jnp.where(query_mask[:, None], largest, 0.0).sum(-1)


def gradient_of(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns a function that maps the arrays to the gradient of a softmax loss over their scores."""

    def loss(queries: Any, query_mask: Any, passages: Any, passage_mask: Any) -> jax.Array:
        scores = function(queries, query_mask, passages, passage_mask)
        own = scores.diagonal()
        return (jax.nn.logsumexp(scores, axis=1) - own).mean()

    return jax.value_and_grad(loss, argnums=(0, 2))


def main() -> None:
    """Parses flags, compiles, runs the timed pairs, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pairs", default="512,4096", help="(default: 512,4096)")
    parser.add_argument("--tokens", default="32,180", help="of a query, of a passage (default: 32,180)")
    parser.add_argument("--dimension", type=int, default=128, help="of the token vectors (default: 128)")
    parser.add_argument("--block_size", type=int, help="passages of a block (default: the function's)")
    parser.add_argument("--timed", type=int, default=64, help="pairs to run; 0: none (default: 64)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: 5)")
    flags = parser.parse_args()
    lengths = tuple(map(int, flags.tokens.split(",")))
    blockwise = functools.partial(losses.maxsim, block_size=flags.block_size)
    steps = {"dense": gradient_of(dense), "blockwise": gradient_of(blockwise)}
    print(
        "| pairs | | temporary MiB | of dense | products, TFLOP | of dense |\n|---:|---|---:|---:|---:|---:|"
    )
    for pairs in map(int, flags.pairs.split(",")):
        of_dense = None
        for name, step in steps.items():
            shapes = [
                shape
                for length in lengths
                for shape in (
                    jax.ShapeDtypeStruct((pairs, length, flags.dimension), jnp.float32),
                    jax.ShapeDtypeStruct((pairs, length), bool),
                )
            ]
            memory = jax.jit(step).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
            found = memory / 2**20, work.traced(step, *shapes).flops / 1e12
            of_dense = of_dense or found
            (mib, share), (products, more) = ((x, x / y) for x, y in zip(found, of_dense, strict=True))
            print(f"| {pairs:,} | {name} | {mib:,.0f} | {share:.4f} | {products:,.2f} | {more:.2f} |")
    if flags.timed:
        timed(steps, flags.timed, lengths, flags.dimension, flags.repeats)


def timed(steps: dict[str, Any], pairs: int, lengths: tuple[int, ...], dimension: int, repeats: int) -> None:
    """Runs both steps in turns and prints the ratio of their medians of CPU time."""
    rng = np.random.default_rng(0)
    arrays = []
    for length in lengths:
        x = rng.normal(size=(pairs, length, dimension)).astype(np.float32)
        arrays += [
            jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True)),
            jnp.ones((pairs, length), bool),
        ]
    jitted = {name: jax.jit(step) for name, step in steps.items()}
    results = {name: jax.block_until_ready(step(*arrays)) for name, step in jitted.items()}
    seconds: dict[str, list[float]] = {name: [] for name in jitted}
    for _ in range(repeats):
        for name, step in jitted.items():
            started = time.process_time()
            jax.block_until_ready(step(*arrays))
            seconds[name].append(time.process_time() - started)
    one, other = (np.median(times) for times in seconds.values())
    differences = jax.tree.leaves(jax.tree.map(lambda x, y: abs(x - y).max(), *results.values()))
    print(f"\n{pairs} pairs: CPU time {other:.2f} s, of dense {other / one:.2f} ({one:.2f} s);", end=" ")
    print(f"largest difference of loss and gradient {max(map(float, differences)):.1e}")


if __name__ == "__main__":
    main()
