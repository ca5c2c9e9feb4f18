"""A small training run, in the test's process or in one of its own that can be interrupted.

usage: python -m tests.training.tiny_run --run_dir=DIR --settings='{"steps": 30, ...}'
"""

import os

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2" + os.environ.get(
        "JAXIR_QUICK_XLA_FLAGS", ""
    )

import json
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir import cli
from jaxir.core.features import TextFormat
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.record_arrays import RecordArrays
from jaxir.data.batches.text_table import TextTable
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model_dir import LoadedModel
from jaxir.models import layers
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel, l2_normalize
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.objective import Objective
from jaxir.objectives.pair_batch import pair_features
from jaxir.runtime.partitioning import MeshConfig
from jaxir.storage import leases
from jaxir.training import trainer
from jaxir.training.loop import TrainResult
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.optimizers import AdamW

LENGTH, VOCABULARY, WIDTH = 12, 64, 32


def pairs(count: int, seed: int = 0) -> ArrayDataset:
    """Pairs of random token ids; a passage begins with half the tokens of its query."""
    rng = np.random.default_rng(seed)
    query, passage = rng.integers(2, VOCABULARY, [2, count, LENGTH])
    passage[:, : LENGTH // 2] = query[:, : LENGTH // 2]
    keys = rng.integers(0, 2**31 - 1, [2, count, 2]).astype(np.int32)
    offsets = np.arange(count + 1) * LENGTH
    tables = {
        name: TextTable(ids.ravel().astype(np.uint16), offsets, key)
        for name, ids, key in zip(("queries", "passages"), (query, passage), keys, strict=True)
    }
    columns = {name: np.arange(count, dtype=np.int32) for name in ("query", "passage")}
    arrays = RecordArrays(tables, columns, np.zeros(count + 1, np.int64))
    return ArrayDataset(pair_features(TextFormat(LENGTH, LENGTH)), arrays, tokenizer_fingerprint="none")


class Hooked(Dataset):
    """Training pairs that call `before(step)` as the batch of each step (from 0) is made."""

    def __init__(self, data, before):
        self._data, self._before, self.num_examples = data, before, data.num_examples
        self.order_depends_on_parts, self.fingerprint = data.order_depends_on_parts, data.fingerprint
        self.features = data.features

    def batched(self, how):
        for step, batch in enumerate(self._data.batched(how), how.start_step):
            self._before(step)
            yield batch


def bert(seed: int = 0, **changes) -> DualEncoderModel:
    """A random BERT, 2 layers and 32 wide."""
    small = {"vocab_size": VOCABULARY, "embed_dim": WIDTH, "num_heads": 2, "mlp_dim": 64}
    config = BertConfig(**(small | {"num_layers": 2, "max_positions": LENGTH} | changes))
    return DualEncoderModel(DualEncoderConfig(backbone=config), rngs=nnx.Rngs(seed))


class Bag(nnx.Module):
    """The mean of token vectors, then a matrix, which compiles quickly."""

    def __init__(self, seed: int = 0, dropout_rate: float = 0.2):
        rngs = nnx.Rngs(seed)
        self.table = layers.param(layers.normal(1.0)(rngs.params(), (VOCABULARY, WIDTH)), "vocab", "embed")
        self.kernel = layers.param(layers.normal(0.2)(rngs.params(), (WIDTH, WIDTH)), "embed", "mlp")
        self.bias = layers.param(jnp.zeros([WIDTH]), "mlp")
        self.dropout_rate = dropout_rate

    def encode(self, ids, *, tower, key=None):
        x = self.table[...][ids].mean(1)
        if key is not None:
            x *= jax.random.bernoulli(key, 1 - self.dropout_rate, x.shape).astype(jnp.float32)
        return l2_normalize(x @ self.kernel[...] + self.bias[...][None])

    def encode_together(self, texts):
        return [self.encode(ids, tower=tower, key=key) for ids, tower, key in texts]


class ToOne(Objective):
    """Draws all parameters to 1, for tests that only need them to change: its gradient compiles quickly."""

    def features(self, form):
        return pair_features(form)

    def __call__(self, model, batch, key=None, *, auxiliary=None, step=None):
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        return sum(jnp.square(x - 1).sum() for x in leaves), {}


def run(
    run_dir: str | Path,
    *,
    steps: int = 30,
    batch_size: int = 8,
    model: nnx.Module | None = None,
    objective=None,
    data=None,
    mesh: dict[str, int] | None = None,
    learning_rate: float = 3e-4,
    **settings,
) -> TrainResult:
    """Trains on 2 devices, among which rows and parameters are split."""
    mesh = mesh or {"data": 1, "fsdp": 2}
    lengths = EncoderSettings(query_max_length=LENGTH, passage_max_length=LENGTH)
    recipe = Recipe(
        model=LoadedModel(model or Bag(), None, lengths, ""),
        objective=objective or Contrastive(),
        data=data or pairs(64),
        steps=steps,
        batch_size=batch_size,
        optimizer=settings.pop("optimizer", AdamW(learning_rate=learning_rate, warmup_steps=3)),
        mesh=MeshConfig(**mesh).build(jax.devices()[: int(np.prod(list(mesh.values())))]),
        **{"dev": pairs(21, seed=1), "log_every": 1, "eval_every": 10, "checkpoint_every": 7} | settings,
    )
    return trainer.train(recipe, run_dir)


STOPPED = {"steps": 12, "checkpoint_every": 3, "eval_every": 4, "keep_last": 3}


def stop_at(run_dir: Path, step: int) -> Path:
    """Trains with the settings `STOPPED`; SIGTERM comes while the batch of `step` is made."""
    before = signal.getsignal(signal.SIGTERM)

    def send(at: int) -> None:
        if at == step:
            # The batch may be made before the run handles SIGTERM, which would then end the process: wait for
            # the handler.
            while signal.getsignal(signal.SIGTERM) is before:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    sent = Hooked(pairs(64), send)
    assert run(run_dir, data=sent, **STOPPED).stopped_by == signal.SIGTERM
    return run_dir


def main(*, run_dir: str, settings: str = "{}") -> int:
    """Trains the small BERT, slowly enough to be interrupted.

    Args:
      run_dir: the run's directory.
      settings: keyword arguments of `run`, in JSON.
    """
    leases.RENEWED_EVERY, leases.STALE_AFTER = 0.5, 3.0
    slow = Hooked(pairs(64), lambda step: time.sleep(0.03))
    result = run(run_dir, model=bert(num_layers=1), data=slow, **json.loads(settings))
    return 128 + result.stopped_by if result.stopped_by else 0


if __name__ == "__main__":
    sys.modules["tests.training.tiny_run"] = sys.modules["__main__"]
    cli.end(cli.main("tests.training.tiny_run:main"))
