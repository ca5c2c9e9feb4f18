"""Gradient caching: the gradients of the batch in one piece, in the memory of one chunk."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.pair import pair
from jaxir.models import layers
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel, l2_normalize
from jaxir.objectives.contrastive import Contrastive
from jaxir.runtime.partitioning import MeshConfig

VOCABULARY, WIDTH, ROWS = 50, 32, 16
TOWERS = ("query", "passage")


class Bags(nnx.Module):
    """Two bags of words with a shared projection: a model that compiles quickly."""

    def __init__(self, dropout_rate: float):
        rngs = nnx.Rngs(0)
        self.dropout_rate = dropout_rate
        self.tables = nnx.Dict(
            {
                t: layers.param(layers.normal(1.0)(rngs.params(), (VOCABULARY, WIDTH)), "vocab", "embed")
                for t in TOWERS
            }
        )
        self.kernel = layers.param(layers.normal(0.2)(rngs.params(), (WIDTH, WIDTH)), "embed", "mlp")

    def encode(self, ids, *, tower, key=None):
        x = self.tables[tower][...][ids].mean(1)
        if key is not None:
            x *= jax.random.bernoulli(key, 1 - self.dropout_rate, x.shape).astype(jnp.float32)
        return l2_normalize(jnp.tanh(x) @ self.kernel[...])

    def encode_together(self, texts):
        return [self.encode(ids, tower=tower, key=key) for ids, tower, key in texts]


def make_batch(rows=ROWS, length=6):
    rng = np.random.default_rng(0)
    ids = {"query_ids": (rows, 4), "passage_ids": (rows, length), "negative_ids": (rows, 2, length)}
    keys = {"query_key": (rows, 2), "passage_key": (rows, 2), "negative_key": (rows, 2, 2)}
    arrays = {k: rng.integers(1, VOCABULARY, shape).astype(np.int32) for k, shape in ids.items()}
    arrays |= {k: rng.integers(0, 2**31, shape).astype(np.int32) for k, shape in keys.items()}
    arrays["passage_key"][5] = arrays["passage_key"][2]  # of two chunks
    return {k: jnp.asarray(v) for k, v in arrays.items()}


def value_and_grad(objective, model, batch, key=None):
    graph, state = nnx.split(model)

    def loss_of(state, batch):
        return objective(nnx.merge(graph, state), batch, key)

    (loss, metrics), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(state, batch)
    return loss, metrics, gradients


def assert_same(cached, direct):
    chex.assert_trees_all_close(cached[:2], direct[:2], rtol=1e-5, atol=1e-6)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(direct[2]))
    assert largest > 1e-2
    chex.assert_trees_all_close(cached[2], direct[2], rtol=0, atol=1e-5 * largest)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(cached[2]))


@pytest.mark.parametrize(
    ("loss", "chunks"),
    [(in_batch_softmax, 2), (pair, 16)],
)
def test_equals_the_direct_gradients(loss, chunks):
    model, batch = Bags(0.0), make_batch()
    direct = value_and_grad(Contrastive(loss=loss), model, batch)
    assert_same(value_and_grad(Contrastive(loss=loss, chunks=chunks), model, batch), direct)


def test_replays_the_random_numbers_of_dropout():
    """Compared with the same chunks and keys, embedded one after another and differentiated directly."""
    model, batch, key, chunks = Bags(0.3), make_batch(), jax.random.key(7), 2

    class InPieces(Contrastive):
        def embed(self, model, batch, key=None):
            keys = [None] * chunks if key is None else jax.random.split(key, chunks)
            parts = [
                super(InPieces, self).embed(model, {k: x[c::chunks] for k, x in batch.items()}, keys[c])
                for c in range(chunks)
            ]
            return jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(ROWS, *x[0].shape[1:]), *parts)

    direct = value_and_grad(InPieces(), model, batch, key)
    cached = value_and_grad(Contrastive(chunks=chunks), model, batch, key)
    assert_same(cached, direct)
    without = nnx.jit(lambda model: Contrastive()(model, batch)[0])(model)
    assert abs(float(cached[0] - without)) > 1e-3  # dropout was on


def test_four_devices_equal_one_and_no_row_moves():
    model, batch, objective = Bags(0.0), make_batch(), Contrastive(chunks=4)
    direct = value_and_grad(Contrastive(), model, batch)
    partitioner = MeshConfig(data=2, fsdp=2).build()
    sharded = {
        k: jax.device_put(v, partitioner.sharding(("batch",) + (None,) * (v.ndim - 1)))
        for k, v in batch.items()
    }
    with partitioner():
        assert_same(value_and_grad(objective, model, sharded), direct)
    # With whole parameters on every device, nothing may be gathered.
    partitioner = MeshConfig(data=4).build()
    rows = partitioner.sharding(("batch",))
    with partitioner():
        embed = jax.jit(lambda batch: objective.embed(model, batch))
        embed = embed.lower({k: jax.device_put(v, rows) for k, v in batch.items()}).compile()
    assert not re.search(r"(all-gather|all-to-all|collective-permute)", embed.as_text())


@pytest.mark.slow
def test_needs_the_memory_of_one_chunk():
    backbone = BertConfig(
        vocab_size=VOCABULARY, embed_dim=WIDTH, num_layers=1, num_heads=2, mlp_dim=64, max_positions=64
    )
    model = DualEncoderModel(DualEncoderConfig(backbone=backbone), rngs=nnx.Rngs(0))
    batch = make_batch(rows=64, length=64)

    def temporary(chunks):
        graph, state = nnx.split(model)
        objective = Contrastive(chunks=chunks)
        gradient = jax.jit(jax.grad(lambda s: objective(nnx.merge(graph, s), batch)[0]))
        return gradient.lower(state).compile().memory_analysis().temp_size_in_bytes

    assert temporary(16) < temporary(1) / 4
