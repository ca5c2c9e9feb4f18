"""Gradient caching: the gradients of the batch in one piece."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.pair import pair
from jaxir.objectives.contrastive import Contrastive
from jaxir.runtime.partitioning import MeshConfig
from tests.objectives.bags import Bags
from tests.objectives.unlabelled import batch_of_pairs

ROWS = 16


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


@pytest.mark.parametrize(("loss", "chunks"), [(in_batch_softmax, 2), (pair, 16)])
def test_equals_the_direct_gradients(loss, chunks):
    model, batch = Bags(0.0), batch_of_pairs(ROWS)
    direct = value_and_grad(Contrastive(loss=loss), model, batch)
    assert_same(value_and_grad(Contrastive(loss=loss, chunks=chunks), model, batch), direct)


def test_replays_the_random_numbers_of_dropout():
    """The reference embeds the same chunks with the same keys, and differentiates them directly."""
    model, batch, key, chunks = Bags(0.3), batch_of_pairs(ROWS), jax.random.key(7), 2

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
    assert abs(float(cached[0] - without)) > 1e-3  # guard: dropout was on


def test_four_devices_equal_one_and_no_row_moves():
    model, batch, objective = Bags(0.0), batch_of_pairs(ROWS), Contrastive(chunks=4)
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
