"""Compares multi-vector training on eight devices and on one: `late_worker.py OUTPUT`."""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.costs import work
from jaxir.losses.distillation import kl_distillation
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.samtone import samtone
from jaxir.models.after_pooling import AfterPooling
from jaxir.models.bert import BertConfig
from jaxir.models.layers import param_shardings
from jaxir.models.multi_vector import Expansion, MultiVectorConfig, MultiVectorModel
from jaxir.objectives.late_interaction import LateDistillation, LateInteraction
from jaxir.runtime.partitioning import MeshConfig

FLAT, CUBE = {"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}
ROWS, NEGATIVES, LENGTHS = 16, 2, (6, 12)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def ids(*shape):
        sizes = rng.integers(2, shape[-1] + 1, (*shape[:-1], 1))
        return (rng.integers(2, 60, shape) * (np.arange(shape[-1]) < sizes)).astype(np.int32)

    arrays = {"query_ids": ids(ROWS, LENGTHS[0]), "passage_ids": ids(ROWS, LENGTHS[1])}
    arrays["negative_ids"] = ids(ROWS, NEGATIVES, LENGTHS[1])
    arrays["passage_score"] = rng.normal(size=ROWS).astype(np.float32)
    return arrays | {"negative_scores": rng.normal(size=(ROWS, NEGATIVES)).astype(np.float32)}


def main(output: Path) -> None:
    backbone = BertConfig(
        vocab_size=64, embed_dim=32, num_layers=1, num_heads=4, mlp_dim=32, max_positions=16
    )
    dense = AfterPooling(kind="dense", dimension=16, use_bias=False, activation="identity")
    config = MultiVectorConfig(
        backbone=backbone,
        token_modules=(dense, AfterPooling(kind="normalize")),
        expansion=Expansion(length=8, token=3),
        skipped=(5, 6),
    )
    graph, state = nnx.split(MultiVectorModel(config, rngs=nnx.Rngs(0)))
    key, examples = jax.random.key(1), batch()

    def found(objective, partitioner=None) -> tuple:
        def step(state, batch):
            return jax.value_and_grad(lambda state: objective(nnx.merge(graph, state), batch, key)[0])(state)

        if partitioner is None:
            return *jax.jit(step)(state, jax.tree.map(jnp.asarray, examples)), 0
        with partitioner():
            placed = jax.device_put(state, param_shardings(state, partitioner))
            rows = jax.device_put(examples, partitioner.sharding(("batch",)))
            largest = work.largest(jax.make_jaxpr(step)(placed, rows).jaxpr)
            return *jax.jit(step)(placed, rows), int(np.prod(largest.shape))

    softmax = {"temperature": 1.0, "bidirectional": False}
    objectives = {
        "softmax": (LateInteraction(loss=functools.partial(in_batch_softmax, **softmax)), FLAT),
        "in chunks": (
            LateInteraction(loss=functools.partial(in_batch_softmax, temperature=1.0), chunks=2),
            CUBE,
        ),
        "samtone": (LateInteraction(loss=functools.partial(samtone, **softmax)), FLAT),
        "distillation": (LateDistillation(loss=functools.partial(kl_distillation, temperature=1.0)), CUBE),
    }
    reports = {}
    for name, (objective, sizes) in objectives.items():
        loss, gradients, _ = found(objective)
        other, others, largest = found(objective, MeshConfig(**sizes).build())
        pairs = zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (gradients, others)), strict=True)
        reports[f"{name}, {sizes}"] = {
            "losses": [float(loss), float(other)],
            "difference": max(float(np.abs(a - b).max()) for a, b in pairs),
            "largest": max(float(np.abs(x).max()) for x in jax.tree.leaves(gradients)),
            "array": largest,
        }
    output.write_text(json.dumps(reports))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
