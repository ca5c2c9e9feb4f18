"""Writes a report on this machine or TPU slice, to send back: planned and measured figures.

    python benchmarks/report.py [--output=jaxir-report.md] [--scale=base|small|tiny]

The report has five parts. Each runs in its own process, one at a time, so that a failure stops no other:

    machine     its devices and the versions of the packages
    training    the step of a dual encoder with SamToNe, on random tokens without padding: time, MFU and
                memory, beside the plan's prediction for the same program
    loss        SamToNe and its gradient by itself, dense and blockwise (see loss.py)
    encoding    passages/s, for random words about as long as MS MARCO's passages, with the trained model
    sparsecores on several v5p or v6e chips: the step with parameters split over all chips (FSDP), without and
                with SPARSE_CORES, which has not yet run on a TPU

Weights are random and nothing is downloaded. The file is a page of Markdown, with all figures as JSON at its
end. It is written again after each part, so that an interruption loses no measured figures. On a pod, start
the script on every machine. Each machine writes its own file; send the file of the first one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import report_machine
from report_page import PARTS, render

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2


class Scale(NamedTuple):
    """How much is measured.

    Attributes:
      about: a description of the scale.
      model: the model's name in `config_of`.
      pairs: number of pairs per batch on each device.
      lengths: numbers of tokens of a query and of a passage.
      steps: number of timed training steps.
      sizes: batch sizes, over all devices, for the loss by itself.
      block_size: block size of the blockwise loss.
      texts: number of passages to encode on each machine.
    """

    about: str
    model: str
    pairs: int
    lengths: tuple[int, int]
    steps: int
    sizes: tuple[int, ...]
    block_size: int
    texts: int


SCALES = {
    "base": Scale(
        "the step of gin/samtone_base.gin, 128 pairs a device",
        "t5-base",
        pairs=128,
        lengths=(64, 256),
        steps=20,
        sizes=(16384, 65536),
        block_size=4096,
        texts=20000,
    ),
    "small": Scale(
        "MiniLM's shape, for CPUs",
        "minilm",
        pairs=32,
        lengths=(32, 128),
        steps=5,
        sizes=(4096,),
        block_size=1024,
        texts=1000,
    ),
    "tiny": Scale(
        "whether all of it runs; its times mean nothing",
        "tiny",
        pairs=8,
        lengths=(8, 16),
        steps=3,
        sizes=(256,),
        block_size=64,
        texts=50,
    ),
}


def main() -> int:
    """Parses flags, runs the parts, writes the report after each and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", default="jaxir-report.md", help="the file to send (default: %(default)s)")
    scales = "; ".join(f"{name}: {scale.about}" for name, scale in SCALES.items())
    parser.add_argument(
        "--scale", choices=SCALES, help=f"{scales} (default: small on CPUs, base on TPUs and GPUs)"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if flags.part:
        return work(flags.part, flags.scale)

    from jaxir.storage.files import atomic_file

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    status = 0
    try:
        for part in PARTS:
            begin = time.monotonic()
            print(f"{part} ...", file=sys.stderr, flush=True)
            found[part] = {"failed": "interrupted"}
            found[part] = run(part, flags.scale)
            found[part]["seconds_in_all"] = round(time.monotonic() - begin, 1)
            if part == "machine":
                kind = "small" if found[part].get("platform", "cpu") == "cpu" else "base"
                flags.scale = found["scale"] = flags.scale or kind
            with atomic_file(flags.output) as file:
                file.write(render(found))
            status = status or int("failed" in found[part])
    except (KeyboardInterrupt, SystemExit) as error:
        status = error.code if isinstance(error, SystemExit) else 130
        with atomic_file(flags.output) as file:
            file.write(render(found))
    print(render(found, with_json=False))
    print(f"written: {flags.output}", file=sys.stderr)
    return status


def run(part: str, scale: str | None) -> dict[str, Any]:
    """Runs one part in its own process; returns its figures, or the error."""
    command = [sys.executable, str(Path(__file__).resolve()), f"--part={part}"]
    command += [f"--scale={scale}"] if scale else []
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            out, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    if process.returncode:
        return {"failed": f"status {process.returncode}: {' | '.join(lines[-3:])[-800:]}"}
    return json.loads(out.splitlines()[-1])


def work(part: str, scale: str | None) -> int:
    """Measures one part in this process, which on a pod is one of several; prints its figures."""
    from jaxir.runtime.distributed import maybe_initialize_distributed, together

    maybe_initialize_distributed()
    with together():
        measure = {
            "training": training,
            "loss": loss,
            "encoding": encoding,
            "sparsecores": lambda scale: sparse_cores(scale, available=has_sparse_cores()),
        }
        figures = report_machine.machine() if part == "machine" else measure[part](SCALES[scale])
        print(json.dumps(figures), flush=True)
    return 0


# ------------------------------------------------------------------------------------------------- parts


def training(scale: Scale, **mesh: Any) -> dict[str, Any]:
    """Compiles the step of training and times it.

    Args:
      scale: the sizes to measure.
      **mesh: arguments of `MeshConfig`.
    """
    import jax
    import numpy as np
    from flax import nnx

    from jaxir.core.features import TextFormat, Tokens
    from jaxir.models.dual_encoder import DualEncoderModel
    from jaxir.objectives.contrastive import Contrastive
    from jaxir.runtime import distributed
    from jaxir.runtime.compile_cache import compile_step
    from jaxir.runtime.partitioning import MeshConfig
    from jaxir.training.run import profiling
    from jaxir.training.step import train_state as state
    from jaxir.training.step.optimizers import Adafactor

    partitioner, objective, built = MeshConfig(**mesh).build(), Contrastive(), Adafactor().build(1000)
    config = config_of(scale)
    model = DualEncoderModel(config, rngs=nnx.Rngs(0))
    plan = state.plan_state(model, built.transform, partitioner)
    part, parts = distributed.share_of_batch(partitioner)
    batch_size = scale.pairs * jax.device_count()
    rng = np.random.default_rng(part)
    batch = {
        name: rng.integers(
            2,
            config.backbone.vocab_size if isinstance(feature, Tokens) else 2**31 - 1,
            (batch_size // parts, *feature.shape),
            dtype=np.int32,
        )
        for name, feature in objective.features(TextFormat(*scale.lengths)).items()
    }
    batch = distributed.place_share(batch, partitioner, part, parts)
    begin = time.perf_counter()
    step, key_data = state.make_step(plan, objective, built), state.key_data_of(0, plan)
    train_state = state.initial_state(model, built.transform, plan)
    with partitioner():
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(plan.shardings, None))
        compiled = compile_step(jitted.lower(train_state, batch, key_data), partitioner)
    compile_seconds = time.perf_counter() - begin
    ideal = profiling.ideal_seconds(plan, objective, train_state, batch, partitioner)
    del model  # the state has the same arrays, which the first step consumes
    for number in range(WARM_UP + scale.steps):
        if number == WARM_UP:
            jax.block_until_ready(train_state)
            begin = time.perf_counter()
        train_state, metrics = compiled(train_state, batch, key_data)
    jax.block_until_ready(train_state)
    seconds = (time.perf_counter() - begin) / scale.steps
    loss = float(metrics["loss"])
    if not math.isfinite(loss):
        raise SystemExit(f"the loss is {loss}")
    return {
        "model": config.summary,
        "parameters": sum(x.size for x in jax.tree.leaves(train_state.params)),
        "dtype": config.backbone.dtype,
        "pairs": batch_size,
        "lengths": list(scale.lengths),
        "steps": scale.steps,
        "loss": loss,
        "compile_seconds": compile_seconds,
        "step_seconds": seconds,
        "examples_per_second": batch_size / seconds,
        "products_at_peak_seconds": ideal,
        "mfu": ideal / seconds if ideal else None,
        **profiling.planned(compiled, partitioner),
        **profiling.peak_memory(jax.local_devices()),
    }


def loss(scale: Scale) -> dict[str, Any]:
    """Times the loss by itself."""
    import jax
    from loss import PRODUCTS, measure

    rows = []
    for size in scale.sizes:
        for block_size in (None, scale.block_size):
            result = measure(size, 768, block_size, "samtone", repeats=3)
            row = {"B": size, "block_size": block_size, "temporary_gib": result["temporary"] / 2**30}
            if "step" in result:
                products = PRODUCTS["samtone", "blockwise" if block_size else "dense"]
                rate = products * 2 * size**2 * 768 / result["step"] / 1e12
                row |= {"seconds": result["step"], "tflops": rate, "loss": result["loss"]}
            rows.append(row)
    return {"devices": jax.device_count(), "dimension": 768, "rows": rows}


def encoding(scale: Scale) -> dict[str, Any]:
    """Encodes passages twice, because the first pass compiles."""
    import jax
    import numpy as np
    from flax import nnx

    from jaxir.interop.model.encoder_settings import EncoderSettings
    from jaxir.models.dual_encoder import DualEncoderModel
    from jaxir.retrieval.encoding.batching import EncodingReport
    from jaxir.retrieval.encoding.text_encoder import DualEncoder
    from jaxir.training.run import profiling

    config = config_of(scale)
    words = [f"w{n}" for n in range(config.backbone.vocab_size - 4)]
    settings = EncoderSettings(query_max_length=scale.lengths[0], passage_max_length=scale.lengths[1])
    encoder = DualEncoder(DualEncoderModel(config, rngs=nnx.Rngs(0)), tokenizer_of(words), settings, "random")
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(math.log(65), 0.6, scale.texts), 10, scale.lengths[1]).astype(int)
    texts = [" ".join(rng.choice(words, length)) for length in lengths]
    passes = []
    for _ in range(2):
        report, begin = EncodingReport(), time.perf_counter()
        encoder.encode(texts, tower="passage", show_progress=False, report=report)
        passes.append(time.perf_counter() - begin)
    return {
        "model": config.summary,
        "dtype": config.backbone.dtype,
        "texts": scale.texts,
        "tokens": report.real_tokens,
        "padded_tokens": report.padded_tokens,
        "shapes": len(report.shapes),
        "devices": jax.local_device_count(),
        "first_pass_seconds": passes[0],
        "seconds": passes[1],
        "passages_per_second": scale.texts / passes[1],
        **profiling.peak_memory(jax.local_devices()),
    }


def sparse_cores(scale: Scale, *, available: bool) -> dict[str, Any]:
    """Times the step of FSDP without and with SPARSE_CORES."""
    if not available:
        return {"skipped": "one chip alone, or chips without SparseCores that send"}
    return {
        name: training(scale, data=1, fsdp=-1, sparse_cores=on)
        for name, on in (("without", False), ("with", True))
    }


def has_sparse_cores() -> bool:
    """Returns whether there are several chips whose SparseCores can communicate."""
    import jax

    from jaxir.runtime.compile_cache import can_send

    return can_send(jax.devices())


def config_of(scale: Scale) -> Any:
    """Returns the DualEncoderConfig of a scale's model."""
    from jaxir.models.bert import BertConfig
    from jaxir.models.dual_encoder import DualEncoderConfig, Projection
    from jaxir.models.t5 import preset

    if scale.model == "t5-base":
        backbone = preset("1.1-base", dtype="bfloat16", remat="products", scan_layers=True)
        return DualEncoderConfig(backbone=backbone, projection=Projection(dimension=768))
    shape = {"embed_dim": 384, "num_layers": 6, "num_heads": 12, "mlp_dim": 1536}
    if scale.model == "tiny":
        shape = {"vocab_size": 1000, "embed_dim": 32, "num_layers": 1, "num_heads": 2, "mlp_dim": 64}
    return DualEncoderConfig(backbone=BertConfig(**shape))


def tokenizer_of(words: list[str]) -> Any:
    """Returns a tokenizer that splits at spaces and knows these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from jaxir.data.text import tokenizer

    ids = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    with tempfile.TemporaryDirectory() as directory:
        backend.save(str(Path(directory) / "tokenizer.json"))
        return tokenizer.Tokenizer.load(directory)


if __name__ == "__main__":
    raise SystemExit(main())
