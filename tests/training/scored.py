"""A minimal cross-encoder, and an objective's loss and gradient for it on one or all devices."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.models import layers
from jaxir.runtime.partitioning import MeshConfig


class Scored(nnx.Module):
    """Scores a pair of texts by the sum of its tokens' vectors."""

    def __init__(self, dropout: float = 0.0):
        self.table = layers.param(layers.normal(1.0)(jax.random.key(0), (50, 16)), "vocab", "embed")
        self.dropout = dropout

    def score(self, ids, token_types, *, key=None):
        return jnp.sin(self.table[...][ids].sum(1)).sum(1)

    def score_texts(self, query_ids, passage_ids, *, key=None):
        one, two = (self.table[...][x].sum(1) for x in (query_ids, passage_ids))
        return layers.dropout(jnp.tanh(one * two), self.dropout, key).sum(1)


def value_and_grad(objective, batch, key=None, model=None):
    graph, state = nnx.split(model or Scored())
    loss_of = lambda state, batch: objective(nnx.merge(graph, state), batch, key)  # noqa: E731
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    (loss, _), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(state, batch)
    (gradient,) = jax.tree.leaves(gradient)
    assert float(jnp.abs(gradient).max()) > 0.01
    return loss, gradient


def on_mesh(batch):
    """Shards the rows of a batch over all devices."""
    partitioner = MeshConfig().build()
    assert partitioner.mesh.size > 1
    return {
        name: jax.device_put(x, partitioner.sharding(("batch", *[None] * (x.ndim - 1)), x.shape))
        for name, x in batch.items()
    }
