"""Compares each text objective's step with SimCSE's, and SimCSE's with sentence-transformers'.

Every file of gin/objectives that needs texts is run with its own settings, on the same random model and texts
without padding. Its step and SimCSE's take turns in one process, so that other work on the machine affects
both. Then SimCSE and the peer run in their own processes, which take turns.

    python benchmarks/objectives.py [--model=minilm|bert-base] [--batch_size=64] [--length=32] [--steps=10]
                                    [--repeats=3] [--objective=NAME[+BINDING...]]... [--dtype=bfloat16]
                                    [--peer_python=PYTHON]

"must cost" is the number of matrix products in the step (jaxir.costs.work), divided by SimCSE's. It includes
a further pass over a text, a decoder or a frozen generator, but not dropout, softmax, random numbers and the
optimizer. SimCSE reads each text twice. The peer trains on pairs (text, text) with
MultipleNegativesRankingLoss, as sentence-transformers trains SimCSE. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from train_step import BERTS, CLIP, LEARNING_RATE, WARM_UP, jaxir_config, peer_encoder, ratio, time_peer

ROOT = Path(__file__).resolve().parent.parent
TEMPERATURE, DROPOUT = 0.05, 0.1
FIRST = "simcse"
TOKENIZER = "st:sentence-transformers/all-MiniLM-L6-v2"  # from a package that `make install` installs


class Ready(NamedTuple):
    """A compiled step, its initial state, and its other inputs: the batch and the random key's data."""

    step: Any
    state: Any
    inputs: tuple[Any, ...]
    flops: float
    compile_seconds: float


def main() -> int:
    """Parses flags, runs the systems, prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=BERTS, default="minilm")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--length", type=int, default=32, help="tokens of each text")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the products")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each objective in a process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of SimCSE and of the peer")
    parser.add_argument(
        "--objective",
        action="append",
        help="a piece of gin/objectives, maybe with settings: multi_task+WEIGHT=1; may be repeated (default:"
        " every one that needs texts)",
    )
    parser.add_argument("--peer_python", help="an interpreter with torch and sentence-transformers")
    parser.add_argument("--worker", choices=["objective", "simcse", "peer"], help=argparse.SUPPRESS)
    flags = parser.parse_args()
    flags.remat = False
    if flags.worker:
        result = work_peer(flags) if flags.worker == "peer" else work_jaxir(flags)
        print(json.dumps(result))
        return 0
    found = {name: run_worker("objective", flags, name) for name in flags.objective or pieces()}
    report_objectives(flags, found)
    if flags.peer_python:
        runs: dict[str, list[dict]] = {"simcse": [], "peer": []}
        for repeat in range(flags.repeats):
            for system, of_system in runs.items():
                run = run_worker(system, flags)
                of_system.append(run["simcse"] if system == "simcse" else run)
                print(f"  repeat {repeat + 1}, {system}: {of_system[-1]['step']:.3f} s a step", flush=True)
        report_peer(flags, runs)
    return 0


def run_worker(system: str, flags: argparse.Namespace, objective: str | None = None) -> dict:
    """Runs one system in its own process: the peer, SimCSE alone, or an objective in turns with SimCSE."""
    python = flags.peer_python if system == "peer" else sys.executable
    names = ("model", "batch_size", "length", "dtype", "steps")
    command = [python, str(Path(__file__).resolve()), f"--worker={system}"]
    command += [f"--{name}={getattr(flags, name)}" for name in names]
    command += [f"--objective={objective}"] if objective else []
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "HF_HUB_OFFLINE": "1"} | os.environ
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{system} failed")
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------ jaxir


def work_jaxir(flags: argparse.Namespace) -> dict:
    """Measures SimCSE and the given objective in turns; returns {name: figures, or why it was left out}."""
    import jax
    from flax import nnx

    from jaxir.core.errors import UserError
    from jaxir.interop import model_dir
    from jaxir.interop.model.encoder_settings import EncoderSettings
    from jaxir.models.dual_encoder import DualEncoderModel

    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = model_dir.read(TOKENIZER)[0].tokenizer
        model = DualEncoderModel(jaxir_config(flags, DROPOUT), rngs=nnx.Rngs(0))
        settings = EncoderSettings(query_max_length=flags.length, passage_max_length=flags.length)
        model_dir.save(Path(directory) / "model", model, tokenizer, settings)
        write_texts(Path(directory) / "texts.txt", flags)
        ready = {}
        for text in dict.fromkeys([FIRST, *(flags.objective or ())]):
            try:
                ready[text] = make_ready(text, flags, directory)
            except UserError as error:
                found[text] = {"left_out": str(error)}
    states = {text: own.state for text, own in ready.items()}
    seconds: dict[str, list[tuple[float, float]]] = {text: [] for text in ready}
    for _ in range(WARM_UP + flags.steps):
        for text, own in ready.items():
            wall, cpu = time.perf_counter(), time.process_time()
            states[text], _ = own.step(states[text], *own.inputs)
            jax.block_until_ready(states[text])
            seconds[text].append((time.perf_counter() - wall, time.process_time() - cpu))
    for text, own in ready.items():
        wall, cpu = (statistics.median(x) for x in zip(*seconds[text][WARM_UP:], strict=True))
        parts = {"model": states[text].params, "beside": states[text].auxiliary}
        parameters = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in parts.items()}
        figures = {"step": wall, "cpu": cpu, "flops": own.flops, "compile": own.compile_seconds}
        found[text] = figures | {"parameters": parameters, "device": jax.local_devices()[0].device_kind}
    return found


def pieces() -> list[str]:
    """Returns the objectives of gin/objectives that need texts."""
    files = sorted((ROOT / "gin" / "objectives").glob("*.gin"))
    return [file.stem for file in files if "gin/unsupervised.gin" in file.read_text(encoding="utf-8")]


def make_ready(text: str, flags: argparse.Namespace, directory: str) -> Ready:
    """Builds what `jaxir.train` would run with an objective's gin file, up to the compiled step.

    Raises:
      UserError: the objective needs a setting that is missing, or the model does not fit it.
    """
    import gin
    import jax
    from flax import nnx

    from jaxir.cli import gin_config
    from jaxir.costs import work as planned
    from jaxir.runtime.compile_cache import compile_step
    from jaxir.train import train
    from jaxir.training.run.recipe import Recipe
    from jaxir.training.step import train_state as state_lib
    from jaxir.training.step.optimizers import AdamW

    name, *more = text.split("+")
    files = ["gin/unsupervised.gin", f"gin/objectives/{name}.gin"]
    given = [f"MODEL={directory}/model", f"TEXT={directory}/texts.txt"]
    given += [
        f"PASSAGE_LENGTH={flags.length}",
        f"QUERY_LENGTH={flags.length}",
        f"BATCH_SIZE={flags.batch_size}",
        f"DTYPE={flags.dtype}",
        f"DROPOUT={DROPOUT}",
        "STEPS=1000",
        *more,
    ]
    gin.clear_config()
    gin_config.bind(train, files, given, {"output_dir": directory})
    optimizer = AdamW(learning_rate=LEARNING_RATE, warmup_steps=0, clip_norm=CLIP)
    recipe = Recipe(**gin.get_bindings(train) | {"optimizer": optimizer}).settled()
    partitioner = recipe.mesh.build()
    loaded = recipe.model.build(seed=0, partitioner=partitioner)
    of_tokens = {"mask_id": loaded.tokenizer.mask_id, "vocabulary": loaded.tokenizer.vocabulary}
    form = loaded.settings.text_format(recipe.num_negatives, **of_tokens)
    objective = recipe.objective
    data = recipe.data.build(loaded.tokenizer, objective.features(form))
    batches = data.batches(
        batch_size=flags.batch_size, seed=0, start_step=0, process_index=0, process_count=1
    )
    batch = {k: jax.device_put(x, partitioner.sharding(("batch",))) for k, x in next(batches).items()}
    auxiliary = objective.auxiliary(loaded.model, form=form, rngs=nnx.Rngs(1))
    objective.read_corpus(auxiliary, data)
    built = optimizer.build(recipe.steps)
    frozen = (*objective.frozen, *(recipe.frozen or ()))
    plan = state_lib.plan_state(
        loaded.model, built.transform, partitioner, auxiliary=auxiliary, frozen=frozen
    )
    state = state_lib.initial_state(loaded.model, built.transform, plan, auxiliary)
    step, key_data = state_lib.make_step(plan, objective, built), state_lib.key_data_of(0, plan)
    started = time.perf_counter()
    with partitioner():
        flops = planned.traced(step, state, batch, key_data).flops
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(plan.shardings, None))
        compiled = compile_step(jitted.lower(state, batch, key_data), partitioner)
    return Ready(compiled, state, (batch, key_data), flops, time.perf_counter() - started)


def write_texts(path: Path, flags: argparse.Namespace) -> None:
    """Writes texts for some batches: two sentences of random words, each with more tokens than `length`."""
    draw = random.Random(0)
    words = [word for word in Path(__file__).read_text(encoding="utf-8").split() if word.isalpha()]

    def sentence() -> str:
        return " ".join(draw.choices(words, k=flags.length)).capitalize() + "."

    lines = (f"{sentence()} {sentence()}" for _ in range(4 * flags.batch_size))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# ------------------------------------------------------------------------------------------------- peer


def work_peer(flags: argparse.Namespace) -> dict:
    """Measures SimCSE as sentence-transformers trains it."""
    import numpy as np
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    encoder = peer_encoder(flags, DROPOUT)
    ids = np.random.default_rng(0).integers(2, encoder.config.vocab_size, (flags.batch_size, flags.length))
    return time_peer(flags, encoder, MultipleNegativesRankingLoss, TEMPERATURE, [ids, ids])


# ----------------------------------------------------------------------------------------------- report


def report_objectives(flags: argparse.Namespace, runs: dict[str, dict[str, dict]]) -> None:
    """Prints a row for each objective, and the objectives that were left out."""
    first = next(iter(runs.values()))[FIRST]
    print(
        f"{flags.model}, {flags.batch_size} texts of {flags.length} tokens, {flags.dtype}, {first['device']};"
        f" medians of {flags.steps} steps; a step of SimCSE: {first['flops'] / 1e9:.1f} GFLOP"
    )
    print("\n| objective | s a step | CPU s | of SimCSE's | must cost | M parameters beside | compile s |")
    print("|---|" + "---:|" * 6)
    measured = {name: run for name, run in runs.items() if "left_out" not in run[name]}
    for name, run in measured.items():
        own, other = run[name], run[FIRST]
        times = f"{own['step']:.3f} | {own['cpu']:.2f} | {own['step'] / other['step']:.2f}"
        beside = f"{own['parameters']['beside'] / 1e6:.1f}"
        print(f"| {name} | {times} | {own['flops'] / other['flops']:.2f} | {beside} | {own['compile']:.1f} |")
    for name in runs.keys() - measured.keys():
        print(f"{name} is left out: {runs[name][name]['left_out']}")


def report_peer(flags: argparse.Namespace, runs: dict[str, list[dict]]) -> None:
    """Prints jaxir's SimCSE beside the peer's."""
    print(f"\nSimCSE; {runs['peer'][0]['versions']}; medians of {flags.repeats} processes in turns\n")
    print("| | s a step | texts/s | time of the peer's |")
    print("|---|" + "---:|" * 3)
    for system, own in runs.items():
        step = statistics.median(run["step"] for run in own)
        print(f"| {system} | {step:.3f} | {flags.batch_size / step:.0f} | {ratio(own, runs['peer'])} |")


if __name__ == "__main__":
    raise SystemExit(main())
