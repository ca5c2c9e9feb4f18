"""Compares a training step with torch: examples/s, model FLOPs utilisation, memory and compile time.

One tower with random weights is trained on random tokens without padding, by in-batch softmax in both
directions and AdamW with clipping. Each system has its own process; the processes run alone, in turns:

    jaxir               the step by itself, then the same step in the training loop with its input pipeline
    jaxir, N chunks     the same with gradient caching (4/3 of the time in theory)
    peer                transformers' encoder with sentence-transformers' loss (MultipleNegativesSymmetric-
                        RankingLoss) in a plain loop: what sentence-transformers trains with, without the
                        overhead of its trainer

    python benchmarks/train_step.py [--model=minilm|t5-base|...] [--batch_size=32] [--chunks=4]
                                    [--peer_python=PYTHON] [--dtype=bfloat16] [--repeats=3]

Nothing is downloaded and TensorFlow is not needed.
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

TEMPERATURE, LEARNING_RATE, CLIP = 0.01, 1e-5, 1.0
WARM_UP = 2
# name -> (vocabulary, width, layers, heads, dimensions of a head, feed-forward units)
BERTS = {"minilm": (30522, 384, 6, 12, 32, 1536), "bert-base": (30522, 768, 12, 12, 64, 3072)}
T5S = {"t5-small": "1.1-small", "t5-base": "1.1-base", "t5-large": "1.1-large", "t5-xl": "1.1-xl"}


def main() -> int:
    """Parses flags, runs the systems in turns, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=[*BERTS, *T5S], default="minilm")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--query_length", type=int, default=32)
    parser.add_argument("--passage_length", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the products")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each system")
    parser.add_argument("--chunks", type=int, default=4, help="of gradient caching; 1 leaves that system out")
    parser.add_argument("--remat", action="store_true", help="recompute blocks in the backward pass (jaxir)")
    parser.add_argument("--peer_python", help="an interpreter with torch and sentence-transformers")
    parser.add_argument("--worker", metavar="SYSTEM", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        result = work_peer(flags) if flags.worker == "peer" else work_jaxir(flags)
        print(json.dumps(result))
        return 0

    systems = ["jaxir"]
    if flags.chunks > 1:
        systems.append(f"jaxir, {flags.chunks} chunks")
    if flags.peer_python:
        systems.append("peer")
    runs: dict[str, list[dict]] = {system: [] for system in systems}
    for repeat in range(flags.repeats):
        for system in systems:
            run = run_worker(system, flags)
            runs[system].append(run)
            print(f"  repeat {repeat + 1}, {system}: {run['step']:.3f} s a step", flush=True)
    report(flags, runs)
    return 0


def run_worker(system: str, flags: argparse.Namespace) -> dict:
    """Runs one system in its own process."""
    python = flags.peer_python if system == "peer" else sys.executable
    command = [python, str(Path(__file__).resolve()), f"--worker={system}"]
    command += [f"--{k}={v}" for k, v in vars(flags).items() if k not in ("worker", "peer_python", "remat")]
    command += ["--remat"] if flags.remat else []
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "HF_HUB_OFFLINE": "1"} | os.environ
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def random_ids(flags: argparse.Namespace, vocabulary: int, count: int):
    """Returns random token ids [count, query_length] and [count, passage_length]."""
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = (flags.query_length, flags.passage_length)
    return [rng.integers(2, vocabulary, (count, length)) for length in lengths]


def peak_memory() -> int:
    """Returns the peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ------------------------------------------------------------------------------------------------ jaxir


def work_jaxir(flags: argparse.Namespace) -> dict:
    """Measures the step by itself, then in the loop."""
    import jax
    import optax
    from flax import nnx

    from jaxir.costs import work as planned
    from jaxir.losses.in_batch import in_batch_softmax
    from jaxir.models.dual_encoder import DualEncoderModel
    from jaxir.objectives.contrastive import Contrastive
    from jaxir.runtime.compile_cache import compile_step
    from jaxir.runtime.partitioning import MeshConfig
    from jaxir.training.step import train_state as state
    from jaxir.training.step.memory import memory_of
    from jaxir.training.step.optimizers import AdamW

    chunks = 1 if flags.worker == "jaxir" else flags.chunks
    config = jaxir_config(flags)
    partitioner = MeshConfig().build()
    model = DualEncoderModel(config, rngs=nnx.Rngs(0))
    data = token_pairs(flags, config.backbone.vocab_size)
    steps = flags.steps + WARM_UP
    optimizer = AdamW(learning_rate=LEARNING_RATE, warmup_steps=0)
    built = optimizer.build(1000)
    plan = state.plan_state(model, built.transform, partitioner)
    batch = next(
        data.batches(batch_size=flags.batch_size, seed=0, start_step=0, process_index=0, process_count=1)
    )
    rows = partitioner.sharding(("batch",))
    batch = {k: jax.device_put(x, rows) for k, x in batch.items()}

    def step_with(chunks: int):
        return state.make_step(plan, Contrastive(loss=in_batch_softmax, chunks=chunks), built)

    key_data = state.key_data_of(0, plan)
    train_state = state.initial_state(model, built.transform, plan)
    started = time.perf_counter()
    with partitioner():
        flops = planned.traced(step_with(1), train_state, batch, key_data).flops
        jitted = jax.jit(step_with(chunks), donate_argnums=0, out_shardings=(plan.shardings, None))
        compiled = compile_step(jitted.lower(train_state, batch, key_data), partitioner)
    compile_seconds = time.perf_counter() - started
    for step in range(steps):
        if step == WARM_UP:
            jax.block_until_ready(train_state)
            wall, cpu = time.perf_counter(), time.process_time()
        train_state, _ = compiled(train_state, batch, key_data)
    jax.block_until_ready(train_state)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    result = {
        "step": wall / flags.steps,
        "cpu": cpu / flags.steps,
        "compile": compile_seconds,
        "flops": flops,
        "program_bytes": memory_of(compiled),
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", peak_memory()),
        "device": jax.local_devices()[0].device_kind,
        "devices": jax.device_count(),
        "parameters": sum(x.size for x in jax.tree.leaves(train_state.params)),
        "versions": f"jax {jax.__version__}, optax {optax.__version__}",
    }
    state.put_into(model, train_state.params)  # the step consumed the model's own arrays
    del train_state, compiled
    return result | {"loop": in_the_loop(flags, model, data, optimizer, partitioner, chunks, steps)}


def in_the_loop(flags: argparse.Namespace, model, data, optimizer, mesh, chunks: int, steps: int) -> float:
    """Returns the seconds per step in a run, without the first interval, which fills the pipeline."""
    from jaxir.interop.model.encoder_settings import EncoderSettings
    from jaxir.interop.model_dir import LoadedModel
    from jaxir.losses.in_batch import in_batch_softmax
    from jaxir.objectives.contrastive import Contrastive
    from jaxir.training import trainer
    from jaxir.training.run.recipe import Recipe

    recipe = Recipe(
        model=LoadedModel(model, None, EncoderSettings(query_max_length=1, passage_max_length=1), ""),
        objective=Contrastive(loss=in_batch_softmax, chunks=chunks),
        data=data,
        steps=steps + flags.steps,
        batch_size=flags.batch_size,
        optimizer=optimizer,
        mesh=mesh,
        log_every=flags.steps,
        checkpoint_every=10**6,
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer.train(recipe, Path(directory) / "run")
        lines = [json.loads(x) for x in (Path(directory) / "run" / "log.jsonl").read_text().splitlines()]
    laps = [x["examples_per_second"] for x in lines if "examples_per_second" in x][1:]
    return flags.batch_size / laps[0]


def jaxir_config(flags: argparse.Namespace, dropout: float = 0.0):
    """Returns the DualEncoderConfig of the model that --model names."""
    from jaxir.models.bert import BertConfig
    from jaxir.models.dual_encoder import DualEncoderConfig
    from jaxir.models.t5 import preset

    if flags.model in T5S:
        backbone = preset(T5S[flags.model], dropout_rate=dropout, dtype=flags.dtype, remat=flags.remat)
        return DualEncoderConfig(backbone=backbone)
    vocabulary, width, layers, heads, _, units = BERTS[flags.model]
    backbone = BertConfig(
        vocab_size=vocabulary,
        embed_dim=width,
        num_layers=layers,
        num_heads=heads,
        mlp_dim=units,
        max_positions=512,
        dropout_rate=dropout,
        attention_dropout_rate=dropout,
        dtype=flags.dtype,
        remat=flags.remat,
    )
    return DualEncoderConfig(backbone=backbone)


def token_pairs(flags: argparse.Namespace, vocabulary: int):
    """Returns pairs of random tokens as training data, so many that batches do not repeat soon."""
    import numpy as np

    from jaxir.core.features import TextFormat
    from jaxir.data.batches.array_dataset import ArrayDataset
    from jaxir.data.batches.record_arrays import RecordArrays
    from jaxir.data.batches.text_table import TextTable
    from jaxir.objectives.pair_batch import pair_features

    count = flags.batch_size * 8
    keys = np.random.default_rng(1).integers(0, 2**31 - 1, [2, count, 2]).astype(np.int32)
    tables = [
        TextTable(ids.ravel().astype(np.uint16), np.arange(count + 1) * ids.shape[1], key)
        for ids, key in zip(random_ids(flags, vocabulary, count), keys, strict=True)
    ]
    columns = {name: np.arange(count, dtype=np.int32) for name in ("query", "passage")}
    tables = dict(zip(("queries", "passages"), tables, strict=True))
    arrays = RecordArrays(tables, columns, np.zeros(count + 1, np.int64))
    features = pair_features(TextFormat(flags.query_length, flags.passage_length))
    return ArrayDataset(features, arrays, tokenizer_fingerprint="none")


# ------------------------------------------------------------------------------------------------- peer


def work_peer(flags: argparse.Namespace) -> dict:
    """Measures the step of torch on pairs."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesSymmetricRankingLoss

    encoder = peer_encoder(flags)
    ids = random_ids(flags, encoder.config.vocab_size, flags.batch_size)
    return time_peer(flags, encoder, MultipleNegativesSymmetricRankingLoss, TEMPERATURE, ids)


def time_peer(flags: argparse.Namespace, encoder, loss_class, temperature: float, ids: list) -> dict:
    """Measures torch's step, without importing jaxir.

    Args:
      flags: the flags with batch size, type of products and number of steps.
      encoder: transformers' encoder, which is trained with mean pooling, cosine and AdamW.
      loss_class: the class of sentence-transformers' loss.
      temperature: the temperature of the loss.
      ids: token ids [B, L] of the texts that belong together, none of them padding.
    """
    import sentence_transformers
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = encoder.to(device).train()

    class Tower(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder

        def forward(self, features):
            hidden = self.encoder(**features).last_hidden_state
            mask = features["attention_mask"][..., None].to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            return {"sentence_embedding": torch.nn.functional.normalize(mean.float(), dim=-1)}

    tower = Tower()
    loss_of = loss_class(tower, scale=1 / temperature)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=LEARNING_RATE, fused=device == "cuda")
    features = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in map(torch.tensor, ids)]
    features = [{name: x.to(device) for name, x in of_one.items()} for of_one in features]

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    for step in range(WARM_UP + flags.steps):
        if step == WARM_UP:
            wait()
            wall, cpu = time.perf_counter(), time.process_time()
        with torch.autocast(device, torch.bfloat16, enabled=flags.dtype == "bfloat16"):
            loss = loss_of(features, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "step": wall / flags.steps,
        "cpu": cpu / flags.steps,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory(),
        "parameters": sum(p.numel() for p in tower.parameters()),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"sentence-transformers {sentence_transformers.__version__}",
    }


def peer_encoder(flags: argparse.Namespace, dropout: float = 0.0):
    """Returns transformers' encoder of the model that --model names, with random weights."""
    import transformers

    if flags.model in T5S:
        sizes = {
            "t5-small": (512, 6, 1024, 8),
            "t5-base": (768, 12, 2048, 12),
            "t5-large": (1024, 16, 2816, 24),
            "t5-xl": (2048, 32, 5120, 24),
        }
        width, heads, units, layers = sizes[flags.model]
        config = transformers.T5Config(
            vocab_size=32128,
            d_model=width,
            d_kv=64,
            d_ff=units,
            num_layers=layers,
            num_heads=heads,
            dropout_rate=dropout,
            feed_forward_proj="gated-gelu",
        )
        return transformers.T5EncoderModel(config)
    vocabulary, width, layers, heads, _, units = BERTS[flags.model]
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=units,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertModel(config, add_pooling_layer=False)


# ----------------------------------------------------------------------------------------------- report


def report(flags: argparse.Namespace, runs: dict[str, list[dict]]) -> None:
    """Prints medians over processes. A ratio is the median of the ratios of consecutive processes."""
    from jaxir.costs import chips

    first = runs["jaxir"][0]
    chip = chips.of_kind(first["device"])
    peak = chip and chip.flops
    print(
        f"\n{flags.model}, {first['parameters'] / 1e6:.1f} M parameters, {flags.batch_size} x "
        f"({flags.query_length} + {flags.passage_length}) tokens, {flags.dtype}; {first['devices']} x "
        f"{first['device']}; {first['flops'] / 1e12:.2f} TFLOP a step; medians of {flags.repeats} processes"
    )
    print(" | ".join(sorted({runs[s][0]["versions"] for s in runs})))
    print(
        "\n| | s a step | CPU s | examples/s | in the loop | of peak | GFLOP/s | memory GiB | compile s "
        "| time of jaxir's | of the peer's |"
    )
    print("|---|" + "---:|" * 10)
    for system, own in runs.items():
        median = {k: statistics.median(r[k] for r in own) for k in ("step", "cpu", "peak_bytes")}
        rate = first["flops"] / median["step"]
        cells = [f"{median['step']:.3f}", f"{median['cpu']:.2f}", f"{flags.batch_size / median['step']:.1f}"]
        if system == "peer":
            cells += ["", "", f"{rate / 1e9:.0f}", f"{median['peak_bytes'] / 2**30:.2f}", ""]
        else:
            loop = statistics.median(r["loop"] / r["step"] for r in own)
            cells += [f"{100 * (loop - 1):+.1f} %"]
            cells += [f"{100 * rate / peak / first['devices']:.1f} %" if peak else ""]
            cells += [f"{rate / 1e9:.0f}", f"{median['peak_bytes'] / 2**30:.2f}"]
            cells += [f"{statistics.median(r['compile'] for r in own):.1f}"]
        cells += [ratio(own, runs["jaxir"]), ratio(own, runs["peer"]) if "peer" in runs else ""]
        print(f"| {system} | " + " | ".join(cells) + " |")


def ratio(own: list[dict], other: list[dict]) -> str:
    """Returns one system's time divided by another's, for wall time and for CPU time."""
    wall, cpu = (
        statistics.median(a[key] / b[key] for a, b in zip(own, other, strict=True)) for key in ("step", "cpu")
    )
    return f"{wall:.2f} (CPU {cpu:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
