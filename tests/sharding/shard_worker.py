"""Trains on meshes and on one device, and reports the differences: `shard_worker.py OUTPUT`."""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxir.costs import collectives, hlo
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.pair import pair
from jaxir.losses.samtone import samtone
from jaxir.models import layers
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel, Projection, l2_normalize
from jaxir.models.t5 import T5Config
from jaxir.objectives.contrastive import KEYS, Contrastive
from jaxir.runtime.distributed import maybe_initialize_distributed, together
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.step import train_state as state_lib
from jaxir.training.step.optimizers import Adafactor, BuiltOptimizer

# All sizes differ, so that a shape in a compiled program identifies the array.
BATCH, NEGATIVES, QUERY_LENGTH, PASSAGE_LENGTH, VOCABULARY, WIDTH, DIMENSION = 40, 2, 5, 7, 64, 32, 24
STEPS = 5
LOSSES = {
    "in_batch_softmax": in_batch_softmax,
    "samtone query": samtone,
    "samtone passage": functools.partial(samtone, same_tower="passage"),
    "samtone both": functools.partial(samtone, same_tower="both"),
    "pair": pair,
}
T5 = T5Config(
    vocab_size=VOCABULARY,
    embed_dim=WIDTH,
    num_layers=2,
    num_heads=8,
    head_dim=6,
    mlp_dim=56,
    relative_buckets=16,
    dropout_rate=0.0,
    remat=True,
    scan_layers=True,
)
# The bag of words trains with all losses, T5 with one.
ONE_PROCESS = {
    "bag": [
        {"data": 8},
        {"fsdp": 8},
        {"data": 2, "fsdp": 4},
        {"slices": 2, "data": 2, "fsdp": 2},
        {"data": 2, "fsdp": 2, "tensor": 2},
    ],
    "t5": [{"data": 2, "fsdp": 2, "tensor": 2}],
}
TWO_PROCESSES = {
    "bag": [{"fsdp": 8}],
    "t5": [{"slices": 2, "data": 2, "fsdp": 2}],
}


class Bag(nnx.Module):
    """The mean of token vectors, then a hidden layer."""

    def __init__(self, rngs: nnx.Rngs):
        dense = functools.partial(layers.Linear, use_bias=True, dtype="float32", rngs=rngs)
        init = layers.normal(0.2)
        self.token = layers.Embedding(
            VOCABULARY, WIDTH, axis="vocab", dtype="float32", init=layers.normal(1.0), rngs=rngs
        )
        self.wi = dense(WIDTH, 56, axes=("embed", "mlp"), init=init)
        self.wo = dense(56, DIMENSION, axes=("mlp", "affinity"), init=init)

    def encode(self, ids, *, tower, key):
        x = layers.constrain_activation(self.token(ids)).mean(1)
        return l2_normalize(self.wo(jnp.tanh(self.wi(x))))

    def encode_together(self, texts):
        return [self.encode(ids, tower=tower, key=key) for ids, tower, key in texts]


class AnyLoss:
    """The contrastive objective with the loss that the batch selects; one program serves all losses."""

    def __call__(self, model, batch, key, *, auxiliary=None, step=None):
        def branch(loss):
            return lambda q, p, n, keys: loss(q, p, n, **keys, temperature=0.05)[0]

        branches = [branch(loss) for loss in LOSSES.values()]
        keys = {name: batch[name] for name in KEYS}
        return jax.lax.switch(batch["loss"], branches, *Contrastive().embed(model, batch, key), keys), {}


MODELS = {
    "bag": (lambda: Bag(nnx.Rngs(0)), AnyLoss(), list(LOSSES)),
    "t5": (
        lambda: DualEncoderModel(
            DualEncoderConfig(backbone=T5, projection=Projection(dimension=DIMENSION)), rngs=nnx.Rngs(0)
        ),
        Contrastive(loss=functools.partial(LOSSES["samtone both"], temperature=0.05)),
        ["samtone both"],
    ),
}


def batches() -> list[dict[str, np.ndarray]]:
    """The batches of a run, with few keys, so that duplicates must be masked across devices."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        batch = {
            "query_ids": rng.integers(1, VOCABULARY, (BATCH, QUERY_LENGTH)),
            "passage_ids": rng.integers(1, VOCABULARY, (BATCH, PASSAGE_LENGTH)),
            "negative_ids": rng.integers(1, VOCABULARY, (BATCH, NEGATIVES, PASSAGE_LENGTH)),
            "query_key": np.repeat(rng.integers(0, 50, (BATCH, 1)), 2, 1),
            "passage_key": np.repeat(rng.integers(0, 50, (BATCH, 1)), 2, 1),
            "negative_key": np.repeat(rng.integers(0, 50, (BATCH, NEGATIVES, 1)), 2, 2),
        }
        batch["query_ids"][::3, 3:] = 0
        made.append({k: x.astype(np.int32) for k, x in batch.items()})
    return made


def keep_gradients() -> optax.GradientTransformation:
    """Passes gradients through, and keeps them as its state."""
    return optax.GradientTransformation(
        lambda params: {"gradients": optax.tree.zeros_like(params)},
        lambda updates, state, params: (updates, {"gradients": updates}),
    )


class Program:
    """The training step, compiled for a mesh."""

    def __init__(self, name, partitioner):
        make, objective, self.losses = MODELS[name]
        adafactor = Adafactor(learning_rate=0.05, min_dim_size_to_factor=16).build(20)
        transform = optax.chain(keep_gradients(), adafactor.transform)
        built = BuiltOptimizer(transform, adafactor.schedule)
        self.partitioner = partitioner
        self.plan = state_lib.plan_state(nnx.eval_shape(make), transform, partitioner)
        self.start = jax.jit(
            lambda: state_lib.TrainState(
                jnp.zeros((), jnp.int32),
                params := nnx.to_pure_dict(nnx.state(make(), nnx.Param)),
                transform.init(params),
            ),
            out_shardings=self.plan.shardings,
        )
        step = state_lib.make_step(self.plan, objective, built)
        self.key_data = state_lib.key_data_of(1, self.plan)
        jitted = jax.jit(step, out_shardings=(self.plan.shardings, None))
        with partitioner():
            first = self.place(batches()[0], 0)
            self.compiled = jitted.lower(self.plan.abstract, first, self.key_data).compile()

    def place(self, batch, loss: int):
        rows, whole = (self.partitioner.sharding(axes) for axes in (("batch",), ()))
        placed = {
            name: jax.make_array_from_callback(x.shape, rows, x.__getitem__) for name, x in batch.items()
        }
        return placed | {"loss": jax.make_array_from_callback((), whole, lambda _: np.int32(loss))}

    def run(self, loss: str):
        """Returns the losses, the gradients of the first step and the parameters before and after."""
        state = self.start()
        found = {f"start{k}": x for k, x in leaves(state.params).items()}
        losses = []
        for batch in batches():
            state, metrics = self.compiled(state, self.place(batch, list(LOSSES).index(loss)), self.key_data)
            losses.append(float(metrics["loss"]))
            if len(losses) == 1:
                found |= {f"gradients{k}": x for k, x in leaves(state.opt_state[0]["gradients"]).items()}
        return losses, found | {f"params{k}": x for k, x in leaves(state.params).items()}


def leaves(tree) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def farthest(arrays: dict[str, jax.Array], expected: dict[str, np.ndarray], what: str) -> float:
    """Returns the largest difference in the parts that this process holds."""
    names = [n for n in expected if n.startswith(what)]
    assert names and names == [n for n in arrays if n.startswith(what)]
    return max(
        float(np.abs(np.asarray(shard.data) - expected[name][shard.index]).max())
        for name in names
        for shard in arrays[name].addressable_shards
    )


def reference(output: Path) -> dict[str, dict[str, np.ndarray]]:
    """Runs every loss on one device and saves the results."""
    found = {}
    for name in MODELS:
        program = Program(name, MeshConfig().build(jax.local_devices()[:1]))
        for loss in program.losses:
            losses, arrays = program.run(loss)
            found[f"{name} {loss}"] = {"losses": np.array(losses), **jax.device_get(arrays)}
    np.savez(output, **{f"{n}|{k}": x for n, arrays in found.items() for k, x in arrays.items()})
    return found


def read_reference(path: Path) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as file:
        for key, value in file.items():
            run, name = key.split("|")
            found.setdefault(run, {})[name] = value
    return found


def main(output: Path) -> None:
    one = jax.process_count() == 1
    path = output / "reference.npz"
    expected = reference(path) if one else read_reference(path)
    report = {}
    for name, meshes in (ONE_PROCESS if one else TWO_PROCESSES).items():
        for sizes in meshes:
            partitioner = MeshConfig(**sizes).build()
            program = Program(name, partitioner)
            found = collectives.read(hlo.parse(program.compiled.as_text()), partitioner.mesh)
            entry = {"collectives": [(c.kind, a.shape, c.axes, c.group) for c in found for a in c.arrays]}
            for loss in program.losses:
                losses, arrays = program.run(loss)
                differences = {
                    what: farthest(arrays, expected[f"{name} {loss}"], what)
                    for what in ("gradients", "params")
                }
                entry[loss] = {"losses": losses, **differences}
            report[f"{name} on " + " x ".join(f"{axis} {n}" for axis, n in sizes.items())] = entry
    text = json.dumps(report)
    (output / f"report-{jax.process_count()}-{jax.process_index()}.json").write_text(text)


if __name__ == "__main__":
    maybe_initialize_distributed()
    with together():
        main(Path(sys.argv[1]))
