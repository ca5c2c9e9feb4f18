"""Compares a LoRA training step on a CPU with PEFT: same weights, batch, loss, optimizer and cores, float32.

The model has the shape of Qwen3 0.6B with random weights and a vocabulary of 8,000, because both systems
freeze the token table. PEFT adds adapters of rank 16 to all dense layers and writes them; jaxir reads these
folders. Both use last-token pooling, cosine, in-batch softmax at temperature 0.02, and AdamW with clipping.
torch's attention is sdpa; neither system recomputes activations. Each system has its own process. They take
turns of two steps, and the second step is timed. The first one is not, because after a pause the system's
kernel takes up to a second to provide the memory pages, and a training run has no such pauses.

    python benchmarks/lora_step.py --peer_python=PYTHON [--layers=28] [--steps=5] [--cores=2] [--scan]

Prints seconds and CPU seconds a step, and compares the losses. Exits with status 1 if the losses of the first
step differ by more than 1e-4, or those after three steps by more than 1e-3. On a machine that others use too,
trust the CPU time. Nothing is downloaded.
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
from collections.abc import Callable, Iterator
from pathlib import Path

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 1024, 16, 8, 128, 3072, 8_000
RANK, ALPHA, TEMPERATURE, LEARNING_RATE, CLIP = 16, 32, 0.02, 1e-4, 1.0
WEIGHT_DECAY, BETAS, EPSILON = 0.01, (0.9, 0.999), 1e-8
COMPARED = {0: 1e-4, 3: 1e-3}  # number of finished steps -> largest allowed difference of the losses
SYSTEMS = ("jaxir", "peft")


def main() -> int:
    """Parses flags, runs both systems in turns, prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--peer_python", required=True, help="an interpreter with torch and peft")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--query_length", type=int, default=32)
    parser.add_argument("--passage_length", type=int, default=64)
    parser.add_argument("--warm_up", type=int, default=1, help="turns before the timed ones, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each system")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--scan", action="store_true", help="scan the layers (jaxir)")
    parser.add_argument("--worker", nargs=2, metavar=("SYSTEM", "DIRECTORY"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.cores])
    if flags.worker:
        system, directory = flags.worker
        return work(jaxir_steps if system == "jaxir" else peft_steps, flags, Path(directory))

    with tempfile.TemporaryDirectory() as directory:
        write_batch(flags, Path(directory))
        # Start PEFT's process first, because it writes the folders that jaxir reads.
        workers = {system: Worker(system, flags, directory) for system in reversed(SYSTEMS)}
        runs: dict[str, list[dict]] = {system: [] for system in SYSTEMS}
        for turn in range(flags.warm_up + flags.steps):
            for system in SYSTEMS if turn % 2 else reversed(SYSTEMS):
                runs[system].append(workers[system].turn())
            found = (f"{s} {runs[s][-1]['wall']:.2f} s (CPU {runs[s][-1]['cpu']:.2f} s)" for s in SYSTEMS)
            print(f"  turn {turn + 1}: {', '.join(found)}", flush=True)
        for worker in workers.values():
            worker.end()
    return report(flags, {system: worker.facts for system, worker in workers.items()}, runs)


class Worker:
    """A process that takes two steps for each line that it reads; `facts` is its first output."""

    def __init__(self, system: str, flags: argparse.Namespace, directory: str):
        python = sys.executable if system == "jaxir" else flags.peer_python
        command = [python, str(Path(sys.argv[0]).resolve()), "--worker", system, directory]
        command += [f"--{k}={v}" for k, v in vars(flags).items() if k not in ("worker", "scan")]
        command += ["--scan"] if getattr(flags, "scan", False) else []
        # torch's threads must not spin while they wait, or the CPU time would count it as work.
        environment = {"OMP_WAIT_POLICY": "passive", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        environment |= {"HF_HUB_OFFLINE": "1"} | os.environ
        self.system = system
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts = self._answer()

    def turn(self) -> dict:
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.system} failed")
        return json.loads(line)


def work(
    steps_of: Callable[[argparse.Namespace, Path], Iterator[dict]], flags: argparse.Namespace, directory: Path
) -> int:
    """Takes two steps for each line of standard input; prints both losses, and the seconds of the second."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries also print to standard output
    started = time.perf_counter()
    steps = steps_of(flags, directory)
    facts = next(steps) | {"start": time.perf_counter() - started}
    print(json.dumps(facts), file=answers, flush=True)
    for _ in sys.stdin:
        first = next(steps)["loss"]
        wall, cpu = time.perf_counter(), time.process_time()
        found = next(steps) | {"first loss": first}
        found |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(found), file=answers, flush=True)
    return 0


def write_batch(flags: argparse.Namespace, directory: Path) -> None:
    """Writes token ids [B, L] of queries and passages; rows are half to entirely full, 0 is padding."""
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {}
    for name, length in (("query", flags.query_length), ("passage", flags.passage_length)):
        ids = rng.integers(5, VOCABULARY, (flags.batch_size, length), np.int32)
        real = rng.integers(length // 2, length + 1, flags.batch_size)
        real[0] = length
        arrays[name] = np.where(np.arange(length) < real[:, None], ids, 0)
    np.savez(directory / "batch.npz", **arrays)


def jaxir_steps(flags: argparse.Namespace, directory: Path) -> Iterator[dict]:
    """Yields facts about the run, then the loss of each step, computed as `jaxir.train` does."""
    import functools

    import jax
    import numpy as np

    from jaxir.interop.build import Pretrained
    from jaxir.losses.in_batch import in_batch_softmax
    from jaxir.objectives.contrastive import Contrastive
    from jaxir.runtime.compile_cache import compile_step
    from jaxir.runtime.partitioning import MeshConfig
    from jaxir.training.step import train_state
    from jaxir.training.step.memory import memory_of
    from jaxir.training.step.optimizers import AdamW

    partitioner = MeshConfig().build()
    how = {"pooling": "lasttoken", "dtype": "float32", "scan_layers": flags.scan, "remat": False}
    loaded = Pretrained(source=f"hf:{directory / 'adapter'}", **how).build(seed=0, partitioner=partitioner)
    optimizer = AdamW(
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        b1=BETAS[0],
        b2=BETAS[1],
        eps=EPSILON,
        clip_norm=CLIP,
    ).build(10**6)  # so many steps that the learning rate hardly falls
    loss = functools.partial(in_batch_softmax, temperature=TEMPERATURE, bidirectional=False)
    plan = train_state.plan_state(loaded.model, optimizer.transform, partitioner)
    state = train_state.initial_state(loaded.model, optimizer.transform, plan)
    with np.load(directory / "batch.npz") as arrays:
        batch = {
            f"{name}_ids": jax.device_put(x, partitioner.sharding(("batch",))) for name, x in arrays.items()
        }
    step, key_data = (
        train_state.make_step(plan, Contrastive(loss=loss), optimizer),
        train_state.key_data_of(0, plan),
    )
    with partitioner():
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(plan.shardings, None))
        compiled = compile_step(jitted.lower(state, batch, key_data), partitioner)
    trained = jax.tree.leaves(plan.trained(state.params, state.auxiliary))
    yield {
        "versions": f"jax {jax.__version__}",
        "trained": sum(x.size for x in trained),
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "program": memory_of(compiled),
    }
    while True:
        state, metrics = compiled(state, batch, key_data)
        jax.block_until_ready(state)
        yield {"loss": float(metrics["loss"])}


def peft_steps(flags: argparse.Namespace, directory: Path) -> Iterator[dict]:
    """Writes the model and its adapters; yields facts about the run, then each loss of a plain loop."""
    import numpy as np
    import peft
    import torch
    import transformers

    torch.set_num_threads(flags.cores)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=flags.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        attn_implementation="sdpa",
        use_cache=False,
    )
    base = transformers.AutoModel.from_config(config)
    base.save_pretrained(directory / "base")
    base.name_or_path = str(directory / "base")
    write_tokenizer(directory / "base")
    lora = peft.LoraConfig(
        task_type="FEATURE_EXTRACTION",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
    )
    model = peft.get_peft_model(base, lora).train()
    model.save_pretrained(directory / "adapter")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY
    )
    with np.load(directory / "batch.npz") as arrays:
        batch = {name: torch.tensor(x) for name, x in arrays.items()}

    def embed(ids: torch.Tensor) -> torch.Tensor:
        mask = ids != 0
        hidden = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        return torch.nn.functional.normalize(hidden[torch.arange(len(ids)), mask.sum(1) - 1], dim=-1)

    yield {
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__},"
        f" peft {peft.__version__}",
        "trained": sum(p.numel() for p in trained),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    while True:
        logits = embed(batch["query"]) @ embed(batch["passage"]).T / TEMPERATURE
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield {"loss": loss.item()}


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer, which a folder must have although the batch consists of ids."""
    import tokenizers
    import transformers

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    words = {word: number for number, word in enumerate([*special.values(), "word"])}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def report(flags: argparse.Namespace, facts: dict[str, dict], runs: dict[str, list[dict]]) -> int:
    """Prints medians and the losses; returns 1 if the losses differ."""
    versions = ", ".join(facts[system]["versions"] for system in SYSTEMS)
    print(
        f"\n{flags.layers} layers x {WIDTH}, {facts['jaxir']['trained'] / 1e6:.2f} M of"
        f" {facts['jaxir']['parameters'] / 1e6:.1f} M parameters trained, {flags.batch_size} x"
        f" ({flags.query_length} + {flags.passage_length}) tokens, float32, {flags.cores} cores;"
        f" medians of {flags.steps} steps; {versions}"
    )
    print("\n| | s a step | CPU s | memory GiB | start s |\n|---|---:|---:|---:|---:|")
    timed = {system: run[flags.warm_up :] for system, run in runs.items()}
    for system, run in timed.items():
        wall, cpu = (statistics.median(step[key] for step in run) for key in ("wall", "cpu"))
        peak, start = run[-1]["peak"] / 2**30, facts[system]["start"]
        print(f"| {system} | {wall:.2f} | {cpu:.2f} | {peak:.2f} | {start:.0f} |")
    pairs = list(zip(*timed.values(), strict=True))
    wall, cpu = (statistics.median(own[key] / other[key] for own, other in pairs) for key in ("wall", "cpu"))
    print(f"\njaxir / peft: {wall:.2f} by wall time, {cpu:.2f} by CPU time (medians of steps in turns)")
    failed = facts["jaxir"]["trained"] != facts["peft"]["trained"]
    for done, limit in COMPARED.items():
        name = "loss" if done % 2 else "first loss"
        own, other = (runs[system][done // 2][name] for system in SYSTEMS)
        failed |= abs(own - other) > limit
        print(f"loss after {done} steps: jaxir {own:.6f}, peft {other:.6f}, may differ by {limit:g}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
