"""Makes, loads, checkpoints and restores a model of 120 MB in a process that holds half of it; tells its memory.

usage: memory_worker.py --devices=2 --output=DIR
       with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID: one of several processes
"""

import argparse
import json
import os
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, required=True)
parser.add_argument("--output", type=Path, required=True)
options = parser.parse_args()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"

import jax
import numpy as np
from flax import nnx

from jaxir.interop import hf, stored
from jaxir.interop.stored import EncoderSettings, StoredModel
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.t5 import T5Config
from jaxir.partitioning import MeshConfig
from jaxir.training import state as state_lib
from jaxir.training.checkpoints import Checkpoints
from jaxir.training.distributed import maybe_initialize_distributed, wait_for_all
from jaxir.training.optimizers import Adafactor

T5 = T5Config(
    vocab_size=512, embed_dim=512, num_layers=8, num_heads=8, head_dim=64, mlp_dim=2048, scan_layers=True
)
MB = 1 << 20


class Peak:
    """The largest growth of this process's own memory (not of files that are mapped) while in force, in MB."""

    def __enter__(self):
        self.top, self.done = 0.0, threading.Event()
        self.start = self._now()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    def _watch(self):
        while not self.done.is_set():
            self.top = max(self.top, self._now() - self.start)
            time.sleep(0.001)

    @staticmethod
    def _now() -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no RssAnon")


def held(tree) -> float:
    """Returns the megabytes of a tree that this process holds."""
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards) / MB


def write_source(directory: Path) -> None:
    """Writes a Hugging Face folder, tensor by tensor of random numbers."""
    config = DualEncoderConfig(backbone=T5)
    rng = np.random.default_rng(0)
    shapes = stored.encoder_shapes(T5)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    directory.mkdir()
    hf.write_encoder(directory, config.backbone, params, pad_id=0)


def main(output: Path) -> None:
    maybe_initialize_distributed()
    config = DualEncoderConfig(backbone=T5)
    partitioner = MeshConfig(fsdp=4).build()
    shapes = stored.model_shapes(config)
    report = {"model": sum(4 * np.prod(s) for s in shapes.values()) / MB}
    stored.initialize(DualEncoderConfig(backbone=T5Config(vocab_size=8, embed_dim=8, num_layers=1, num_heads=1, head_dim=8, mlp_dim=8)), seed=0, partitioner=partitioner)

    with Peak() as peak:
        model = stored.initialize(config, seed=0, partitioner=partitioner)
        jax.block_until_ready(nnx.state(model))
    report["from scratch"] = peak.top
    report["held"] = held(nnx.state(model))

    transform = Adafactor(min_dim_size_to_factor=64).build(10).transform
    plan = state_lib.plan_state(model, transform, partitioner)
    checkpoints = Checkpoints(output / "run", {}, keep_last=1, metric=None)
    checkpoints.open(plan.abstract)
    with Peak() as peak:
        state = state_lib.initial_state(model, transform, plan)
        checkpoints.save(1, state, None)
        checkpoints.settle()
    report["save"] = peak.top
    report["optimizer"] = held(state.opt_state)
    report["whole optimizer"] = sum(x.nbytes for x in jax.tree.leaves(state.opt_state)) / MB
    expected = float(jax.jit(lambda p: sum(abs(x).sum() for x in jax.tree.leaves(p)))(state.params))
    checkpoints.close()
    del model, state

    wait_for_all("saved")
    with Peak() as peak:
        again = Checkpoints(output / "run", {}, keep_last=1, metric=None)
        resumed = again.open(plan.abstract)
    report["restore"] = peak.top
    found = float(jax.jit(lambda p: sum(abs(x).sum() for x in jax.tree.leaves(p)))(resumed.state.params))
    assert found == expected
    again.close()
    del resumed

    if jax.process_index() == 0:
        write_source(output / "hf")
    wait_for_all("written")
    encoder = hf.read_encoder(output / "hf")
    with Peak() as peak:
        params = {f"encoder.{name}": value for name, value in encoder.params.items()}
        settings = EncoderSettings(query_max_length=8, passage_max_length=8)
        source = StoredModel(config=config, params=params, tokenizer=None, settings=settings)
        model = stored.build(source, partitioner)
        jax.block_until_ready(nnx.state(model))
    report["safetensors"] = peak.top
    (output / f"memory-{jax.process_index()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(options.output)
