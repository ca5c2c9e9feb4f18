"""Estimates from the TPU compiler how many passages a second TPUs encode, and the hours for whole corpora.

    .venv/bin/python benchmarks/encode_plan.py --model=hf:google/t5-v1_1-base --topology=v5e:2x2

Compiles the program that `jaxir.encode --dtype=bfloat16` runs on a full batch of passages of --length tokens,
and reads its matrix products and memory traffic (`jaxir.planning`). Nothing runs on a TPU, and no weights are
read. A real run is slower, because the estimate leaves out the tokenizer, disk, network and padding. Run
`make plan-tools` first.
"""

from __future__ import annotations

import argparse
import sys

from jaxir.core.errors import UserError
from jaxir.costs import step_costs, targets
from jaxir.interop.build import Pretrained
from jaxir.interop.model import stored
from jaxir.planning import advice, architecture, devices
from jaxir.planning.plan_report import gib
from jaxir.planning.program import bytes_of, compile_step, model_step
from jaxir.retrieval.encoding.batch_runner import ACCELERATOR_BATCH_TOKENS
from jaxir.runtime.compile_cache import keep_no_more_programs
from jaxir.runtime.partitioning import MeshConfig

CORPORA = {"8.8 million": 8.8e6, "a billion": 1e9}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="as jaxir.train takes it: hf:..., st:..., t5x:...")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--length", type=int, default=80, help="tokens of a passage")
    parser.add_argument("--batch_tokens", type=int, default=ACCELERATOR_BATCH_TOKENS)
    parser.add_argument("--weights", choices=["int8", "nf4"], help="as jaxir.encode takes it")
    flags = parser.parse_args()
    target = targets.parse(flags.topology)
    found = devices.get(target)
    config, _ = architecture.describe(Pretrained(source=flags.model))
    config = stored.replace_backbone(config, dtype="bfloat16")
    keep_no_more_programs()
    partitioner = advice.build_mesh(MeshConfig(), found, target)
    texts = target.count * (flags.batch_tokens // flags.length)
    step = model_step(
        config,
        lambda model, ids: model.encode(ids, tower="passage"),
        (texts, flags.length),
        partitioner,
        flags.weights,
    )
    compiled = compile_step(step)
    kept = flags.weights or "bfloat16"
    print(f"{flags.model}, {kept}, {flags.topology}: {texts} passages of {flags.length} tokens a batch")
    print(f"  memory on each chip {gib(compiled.size)} GiB, of it parameters {gib(bytes_of(step.state))}")
    if compiled.program is None or compiled.short_by:
        print("  does not fit")
        return 1
    done, _, times, _ = step_costs.of_program(compiled.program, target, partitioner.mesh)
    print("  " + ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times.parts.items()))
    for name, seconds in (("all at once", times.overlapped), ("one after another", times.in_turn)):
        rate = texts / seconds
        mfu = done.flops / seconds / target.chip.flops
        hours = "; ".join(f"{what} in {count / rate / 3600:,.2f} h" for what, count in CORPORA.items())
        print(f"  {name}: {rate:,.0f} passages/s, {rate / target.count:,.0f} a chip ({mfu:.0%} MFU); {hours}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
