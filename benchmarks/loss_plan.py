"""Estimates time and memory of a blockwise loss and its gradient on TPUs, from the TPU compiler.

    python benchmarks/loss_plan.py [--topology=v5e:2x4] [--size=1048576] [--dimension=768] [--block_size=4096]
                                   [--loss=samtone|in_batch_softmax|pair] [--gradient_precision=highest]

Compiles only the loss for a slice, and reads its matrix products and memory traffic from the program
(`jaxir.costs`). Nothing runs on a TPU, and a real run is slower. A kernel that keeps tiles on the chip could
save at most the time that is not spent on products. Run `make plan-tools` first.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp

from jaxir.core.errors import UserError
from jaxir.costs import step_costs, targets
from jaxir.planning import advice, devices
from jaxir.planning.plan_report import gib
from jaxir.planning.program import Step, compile_step, compiler_settings
from jaxir.runtime.compile_cache import keep_no_more_programs
from jaxir.runtime.partitioning import MeshConfig

MODULES = {"samtone": "samtone", "in_batch_softmax": "in_batch", "pair": "pair"}


def main() -> int:
    """Parses flags, compiles, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--topology", default="v5e:2x4", help="a TPU slice (default: v5e:2x4)")
    parser.add_argument("--size", type=int, default=2**20, help="pairs, over all chips (default: 1048576)")
    parser.add_argument("--dimension", type=int, default=768, help="of the embeddings (default: 768)")
    parser.add_argument("--block_size", type=int, default=4096, help="(default: 4096)")
    parser.add_argument("--loss", choices=MODULES, default="samtone", help="(default: samtone)")
    parser.add_argument("--gradient_precision", default="highest", help="highest, high or default")
    flags = parser.parse_args()
    target = targets.parse(flags.topology)
    found = devices.get(target)
    keep_no_more_programs()
    partitioner = advice.build_mesh(MeshConfig(), found, target)
    loss = getattr(importlib.import_module(f"jaxir.losses.{MODULES[flags.loss]}"), flags.loss)
    how = {"block_size": flags.block_size, "gradient_precision": flags.gradient_precision}

    def loss_and_metrics(embeddings, keys):
        return loss(*embeddings, **keys, **how)

    rows = partitioner.sharding(("batch",))
    vectors = jax.ShapeDtypeStruct((flags.size, flags.dimension), jnp.float32, sharding=rows)
    key = jax.ShapeDtypeStruct((flags.size, 2), jnp.int32, sharding=rows)
    embeddings, keys = (vectors, vectors), {"query_key": key, "passage_key": key}
    function = jax.jit(jax.value_and_grad(loss_and_metrics, has_aux=True))
    compiled = compile_step(Step(function, embeddings, embeddings, keys, loss_and_metrics, partitioner))
    settings = f" ({', '.join(given)})" if (given := compiler_settings().given) else ""
    print(f"{flags.loss}, {flags.size:,} x {flags.dimension}, {how}, {flags.topology}{settings}")
    print(f"  memory on each chip {gib(compiled.size)} GiB, of it embeddings and keys {gib(compiled.held)}")
    if compiled.program is None:
        print("  does not fit")
        return 1
    program = dataclasses.replace(compiled.program, turns=turns(flags.size // target.count, flags, target))
    _, _, times, followed = step_costs.of_program(program, target, partitioner.mesh)
    print("  " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times.parts.items()))
    print(f"  as scheduled {followed.seconds:.3g} s, of it products {times.compute / followed.seconds:.1%};")
    print(f"  transfers hidden {followed.hidden_seconds:.3g} of {times.interconnect:.3g} s")
    return 0


def turns(rows: int, flags: argparse.Namespace, target: targets.Target) -> int:
    """Returns with how many tiles of a shard a block of rows is multiplied, on average over the ring's steps.

    The compiled program does not show this number, because some shards are only multiplied from the diagonal
    on (`jaxir.losses._tiles`).
    """
    blocks, steps = -(-rows // flags.block_size), target.count // 2 + 1
    diagonal = blocks * (blocks + 1) // 2
    halved = 1 if target.count % 2 or target.count == 1 else 2
    return max(round((halved * diagonal + (steps - halved) * blocks**2) / (steps * blocks)), 1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
