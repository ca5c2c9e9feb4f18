"""The contrastive objective: towers, dropout, keys, and shards."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.features import TextFormat
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.samtone import samtone
from jaxir.models.dual_encoder import Projection
from jaxir.objectives.contrastive import Contrastive
from jaxir.runtime.partitioning import MeshConfig
from tests.objectives import unlabelled
from tests.objectives.unlabelled import WORDS

WIDTH = 32


def make_model(sharing):
    return unlabelled.make_model(dropout=0.3, sharing=sharing, projection=Projection(dimension=WIDTH))


@pytest.fixture(scope="module")
def model():
    return make_model("ade_spl")


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    ids = {"query_ids": (8, 4), "passage_ids": (8, 12), "negative_ids": (8, 2, 12)}
    keys = {"query_key": (8, 2), "passage_key": (8, 2), "negative_key": (8, 2, 2)}
    arrays = {k: rng.integers(1, WORDS, shape).astype(np.int32) for k, shape in ids.items()}
    arrays |= {k: rng.integers(0, 2**31, shape).astype(np.int32) for k, shape in keys.items()}
    arrays["passage_key"][5] = arrays["passage_key"][2]
    arrays["negative_key"][1, 0] = arrays["passage_key"][0]
    return {k: jnp.asarray(v) for k, v in arrays.items()}


def test_embeds_each_feature_through_its_tower(model, batch):
    embeddings = Contrastive().embed(model, batch)
    chex.assert_trees_all_equal(embeddings.query, model.encode(batch["query_ids"], tower="query"))
    chex.assert_trees_all_equal(embeddings.passage, model.encode(batch["passage_ids"], tower="passage"))
    chex.assert_shape(embeddings.negatives, (8, 2, WIDTH))
    for n in range(2):
        chex.assert_trees_all_close(
            embeddings.negatives[:, n], model.encode(batch["negative_ids"][:, n], tower="passage"), atol=1e-6
        )


def test_loss_sees_negatives_and_keys(model, batch):
    objective = Contrastive(loss=in_batch_softmax)
    loss, metrics = objective(model, batch)
    embeddings = objective.embed(model, batch)
    keys = {k: batch[k] for k in ("query_key", "passage_key", "negative_key")}
    expected, _ = in_batch_softmax(*embeddings, **keys)
    chex.assert_trees_all_close(loss, expected)
    assert set(metrics) >= {"accuracy", "loss_query_to_passage"}
    others = [
        objective(model, {k: v for k, v in batch.items() if k not in drop})[0]
        for drop in (keys, ["negative_ids"])
    ]
    assert all(abs(float(loss - other)) > 1e-3 for other in others)


def test_a_batch_may_have_no_negatives_and_keys(model, batch):
    objective = Contrastive()
    pairs = {k: batch[k] for k in objective.features(TextFormat(4, 12)) if k.endswith("_ids")}
    embeddings = objective.embed(model, pairs)
    assert embeddings.negatives is None
    chex.assert_trees_all_close(objective(model, pairs)[0], samtone(embeddings.query, embeddings.passage)[0])


def test_dropout_differs_between_calls_of_a_tower_and_follows_the_key(batch):
    model = make_model("sde")
    same = dict(batch, passage_ids=batch["query_ids"], negative_ids=batch["query_ids"][:, None])
    objective = Contrastive()
    still = objective.embed(model, same)
    chex.assert_trees_all_close(still.query, still.passage, still.negatives[:, 0], atol=1e-6)
    query, passage, negatives = objective.embed(model, same, jax.random.key(0))
    for a, b in (
        (query, passage),
        (passage, negatives[:, 0]),
        (query, negatives[:, 0]),
        (query, still.query),
    ):
        assert np.abs(a - b).max() > 0.05
    again = objective.embed(model, same, jax.random.key(0))
    chex.assert_trees_all_equal(again.passage, passage)
    assert np.abs(objective.embed(model, same, jax.random.key(1)).passage - passage).max() > 0.05


@pytest.mark.slow
def test_four_devices_equal_one(model, batch):
    """With dropout: the loss, and every parameter's gradient, none of which is all zero."""
    objective = Contrastive()
    graph, state = nnx.split(model)

    def step(state, batch):
        return objective(nnx.merge(graph, state), batch, jax.random.key(0))[0]

    single, gradients = jax.jit(jax.value_and_grad(step))(state, batch)
    partitioner = MeshConfig(data=2, fsdp=2).build()
    sharded = {
        k: jax.device_put(v, partitioner.sharding(("batch",) + (None,) * (v.ndim - 1)))
        for k, v in batch.items()
    }
    assert sharded["query_ids"].addressable_shards[0].data.shape == (2, 4)
    with partitioner():
        value, sharded_gradients = jax.jit(lambda s, b: jax.value_and_grad(step)(s, b))(state, sharded)
    chex.assert_trees_all_close(value, single, rtol=1e-5)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients))
    chex.assert_trees_all_close(sharded_gradients, gradients, rtol=1e-3, atol=1e-5 * largest)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradients))
