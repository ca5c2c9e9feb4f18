"""Compares a multi-vector encoder's training step on a CPU with PyLate: same weights, batch and optimizer.

The model has the shape of MiniLM with random weights and a projection to 128 dimensions. PyLate makes it, and
jaxir reads its folder. Queries are filled to their full length with mask tokens, to which other tokens do not
attend. Each query has hard negatives. The loss is the in-batch softmax of MaxSim at temperature 1, in
float32, without dropout, by AdamW with clipping. Each system has its own process, and they take turns, as in
lora_step.py.

    python benchmarks/late_interaction_step.py --peer_python=PYTHON [--batch_size=16] [--negatives=1]

Prints seconds and CPU seconds a step, and compares the losses. Exits with status 1 if the losses of the first
step differ by more than 1e-5, relatively, or those after three steps by more than 1e-3. On a machine that
others use too, trust the CPU time. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lora_step import Worker, work

WIDTH, HEADS, MLP, VOCABULARY, DIMENSION = 384, 12, 1536, 30_522, 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LEARNING_RATE, CLIP, WEIGHT_DECAY, BETAS, EPSILON = 1e-5, 1.0, 0.01, (0.9, 0.999), 1e-8
COMPARED = {0: 1e-5, 3: 1e-3}  # number of finished steps -> largest relative difference of the losses
SYSTEMS = ("jaxir", "pylate")


def main() -> int:
    """Parses flags, runs both systems in turns, prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--peer_python", required=True, help="an interpreter with torch and pylate")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--negatives", type=int, default=1, help="hard negatives of each query")
    parser.add_argument("--query_length", type=int, default=32)
    parser.add_argument("--passage_length", type=int, default=180)
    parser.add_argument("--warm_up", type=int, default=1, help="turns before the timed ones, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each system")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--worker", nargs=2, metavar=("SYSTEM", "DIRECTORY"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.cores])
    if flags.worker:
        system, directory = flags.worker
        return work(jaxir_steps if system == "jaxir" else pylate_steps, flags, Path(directory))

    with tempfile.TemporaryDirectory() as directory:
        write_batch(flags, Path(directory))
        # Start PyLate's process first, because it writes the folder that jaxir reads.
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


def write_batch(flags: argparse.Namespace, directory: Path) -> None:
    """Writes token ids [B, L] of queries, passages and negatives, half to entirely full; 0 is padding."""
    import numpy as np

    rng = np.random.default_rng(0)
    sides = {"query": flags.query_length, "passage": flags.passage_length}
    sides |= {f"negative_{i}": flags.passage_length for i in range(flags.negatives)}
    arrays = {}
    for name, length in sides.items():
        ids = rng.integers(len(SPECIAL), VOCABULARY, (flags.batch_size, length), np.int32)
        real = rng.integers(length // 2, length + 1, flags.batch_size)
        real[0] = length
        arrays[name] = np.where(np.arange(length) < real[:, None], ids, 0)
    np.savez(directory / "batch.npz", **arrays)


def jaxir_steps(flags: argparse.Namespace, directory: Path) -> Iterator[dict]:
    """Yields facts about the run, then the loss of each step, computed as `jaxir.train` does."""
    import functools

    import jax
    import numpy as np

    from jaxir.interop.build import PretrainedMultiVector
    from jaxir.losses.in_batch import in_batch_softmax
    from jaxir.objectives.late_interaction import LateInteraction
    from jaxir.runtime.compile_cache import compile_step
    from jaxir.runtime.partitioning import MeshConfig
    from jaxir.training.step import train_state
    from jaxir.training.step.optimizers import AdamW

    partitioner = MeshConfig().build()
    source = PretrainedMultiVector(source=f"st:{directory / 'model'}", dropout_rate=0.0)
    loaded = source.build(seed=0, partitioner=partitioner)
    how = {"weight_decay": WEIGHT_DECAY, "b1": BETAS[0], "b2": BETAS[1], "eps": EPSILON, "clip_norm": CLIP}
    # So many steps that the learning rate hardly falls.
    optimizer = AdamW(learning_rate=LEARNING_RATE, **how).build(10**6)
    plan = train_state.plan_state(loaded.model, optimizer.transform, partitioner)
    state = train_state.initial_state(loaded.model, optimizer.transform, plan)
    with np.load(directory / "batch.npz") as arrays:
        batch = {f"{name}_ids": arrays[name] for name in ("query", "passage")}
        if flags.negatives:
            negatives = [arrays[f"negative_{i}"] for i in range(flags.negatives)]
            batch["negative_ids"] = np.stack(negatives, axis=1)
    batch = jax.device_put(batch, partitioner.sharding(("batch",)))
    objective = LateInteraction(
        loss=functools.partial(in_batch_softmax, temperature=1.0, bidirectional=False)
    )
    step, key_data = train_state.make_step(plan, objective, optimizer), train_state.key_data_of(0, plan)
    with partitioner():
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(plan.shardings, None))
        compiled = compile_step(jitted.lower(state, batch, key_data), partitioner)
    sizes = sum(x.size for x in jax.tree.leaves(state.params))
    yield {"versions": f"jax {jax.__version__}", "parameters": sizes}
    while True:
        state, metrics = compiled(state, batch, key_data)
        jax.block_until_ready(state)
        yield {"loss": float(metrics["loss"])}


def pylate_steps(flags: argparse.Namespace, directory: Path) -> Iterator[dict]:
    """Writes the model; yields facts about the run, then the loss of each step of a plain loop."""
    import importlib.metadata

    import numpy as np
    import torch
    import transformers
    from pylate import losses, models

    torch.set_num_threads(flags.cores)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=flags.layers,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertModel(config).save_pretrained(directory / "base")
    write_tokenizer(directory / "base")
    model = models.ColBERT(
        str(directory / "base"),
        embedding_size=DIMENSION,
        query_length=flags.query_length,
        document_length=flags.passage_length,
        query_prefix="",
        document_prefix="",
        skiplist_words=[],
        device="cpu",
    )
    model.save(str(directory / "model"))
    model.train()
    loss_of, trained = losses.Contrastive(model), list(model.parameters())
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    features = []
    with np.load(directory / "batch.npz") as arrays:
        for name in ("query", "passage", *(f"negative_{i}" for i in range(flags.negatives))):
            ids = torch.tensor(arrays[name]).long()
            filled = torch.where(ids == 0, SPECIAL.index("[MASK]") if name == "query" else 0, ids)
            features.append({"input_ids": filled, "attention_mask": (ids != 0).long()})
    names = ("torch", "transformers", "sentence-transformers", "pylate")
    yield {
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
        "parameters": sum(p.numel() for p in trained),
    }
    while True:
        loss = loss_of([dict(side) for side in features])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield {"loss": loss.item()}


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer, which a folder must have although the batch consists of ids."""
    import tokenizers
    import transformers

    words = {word: number for number, word in enumerate([*SPECIAL, "word"])}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(directory)


def report(flags: argparse.Namespace, facts: dict[str, dict], runs: dict[str, list[dict]]) -> int:
    """Prints medians and the losses; returns 1 if the losses differ."""
    tokens = f"({flags.query_length} + {1 + flags.negatives} x {flags.passage_length})"
    print(
        f"\n{flags.layers} layers x {WIDTH}, {facts['jaxir']['parameters'] / 1e6:.1f} M parameters,"
        f" {flags.batch_size} x {tokens} tokens,"
        f" float32, {flags.cores} cores; medians of {flags.steps} steps;"
        f" {', '.join(facts[system]['versions'] for system in SYSTEMS)}"
    )
    print("\n| | s a step | CPU s | memory GiB |\n|---|---:|---:|---:|")
    timed = {system: run[flags.warm_up :] for system, run in runs.items()}
    for system, run in timed.items():
        wall, cpu = (statistics.median(step[key] for step in run) for key in ("wall", "cpu"))
        print(f"| {system} | {wall:.2f} | {cpu:.2f} | {run[-1]['peak'] / 2**30:.2f} |")
    pairs = list(zip(*timed.values(), strict=True))
    wall, cpu = (statistics.median(other[key] / own[key] for own, other in pairs) for key in ("wall", "cpu"))
    print(f"\npylate / jaxir: {wall:.2f} by wall time, {cpu:.2f} by CPU time (medians of steps in turns)")
    failed = False
    for done, limit in COMPARED.items():
        name = "loss" if done % 2 else "first loss"
        own, other = (runs[system][done // 2][name] for system in SYSTEMS)
        failed |= abs(own - other) > limit * abs(other)
        print(f"loss after {done} steps: jaxir {own:.6f}, pylate {other:.6f}, may differ by {limit:g} of it")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
