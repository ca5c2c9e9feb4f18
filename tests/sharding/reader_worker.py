"""Compares a reader's loss, gradients and answers on eight devices and on one: `reader_worker.py OUTPUT`."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.models.decoding import Decoding
from jaxir.models.layers import param_shardings
from jaxir.models.seq2seq import Seq2SeqConfig, Seq2SeqModel
from jaxir.models.t5 import T5Config
from jaxir.objectives.reader import FusionInDecoder
from jaxir.runtime.partitioning import MeshConfig

MESHES = {1: {"data": 8}, 2: {"data": 2, "fsdp": 2, "tensor": 2}}  # number of chunks -> mesh
ROWS, PASSAGES, LENGTH = 16, 3, 12


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, LENGTH + 1, (ROWS, PASSAGES, 1))
    sizes[:, 0] = LENGTH
    source = rng.integers(2, 60, (ROWS, PASSAGES, LENGTH)) * (np.arange(LENGTH) < sizes)
    target = rng.integers(2, 60, (ROWS, 5)) * (np.arange(5) < rng.integers(1, 6, (ROWS, 1)))
    return {"source_ids": source.astype(np.int32), "target_ids": target.astype(np.int32)}


def main(output: Path) -> None:
    backbone = T5Config(vocab_size=64, embed_dim=32, num_layers=1, num_heads=4, head_dim=8, mlp_dim=32)
    model = Seq2SeqModel(Seq2SeqConfig(backbone=backbone, num_decoder_layers=1), rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    key, examples = jax.random.key(1), batch()
    how = Decoding(max_new_tokens=6, num_beams=2)

    def found(objective: FusionInDecoder, partitioner=None) -> tuple:
        def step(state, batch):
            def loss_of(state):
                return objective(nnx.merge(graph, state), batch, key)[0]

            tokens = nnx.merge(graph, state).generate(batch["source_ids"], how)
            return *jax.value_and_grad(loss_of)(state), tokens

        if partitioner is None:
            return jax.jit(step)(state, jax.tree.map(jnp.asarray, examples))
        with partitioner():
            placed = jax.device_put(state, param_shardings(state, partitioner))
            rows = jax.device_put(examples, partitioner.sharding(("batch",)))
            return jax.jit(step)(placed, rows)

    reports = {}
    for chunks, sizes in MESHES.items():
        objective = FusionInDecoder(passages=PASSAGES, chunks=chunks)
        loss, gradients, written = found(objective)
        other, others, again = found(objective, MeshConfig(**sizes).build())
        leaves, others = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (gradients, others))
        reports[f"{chunks} chunks, {sizes}"] = {
            "losses": [float(loss), float(other)],
            "difference": max(float(np.abs(a - b).max()) for a, b in zip(leaves, others, strict=True)),
            "least": min(float(np.abs(x).max()) for x in leaves),
            "same": bool(np.array_equal(np.asarray(written), np.asarray(again))),
        }
    output.write_text(json.dumps(reports))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
