"""The contrastive objective, also of the inverse cloze task: towers, dropout, keys and losses."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses.in_batch import in_batch_softmax
from jaxir.models.dual_encoder import Projection
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.ict import ICT
from tests.objectives import unlabelled
from tests.objectives.unlabelled import make_texts, on_mesh, value_and_grad

WIDTH = 32


def make_model(sharing):
    return unlabelled.make_model(dropout=0.3, sharing=sharing, projection=Projection(dimension=WIDTH))


@pytest.fixture(scope="module")
def model():
    return make_model("ade_spl")


@pytest.fixture
def batch():
    return unlabelled.batch_of_pairs(8)


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


def test_dropout_differs_between_calls_of_a_tower_and_follows_the_key(batch):
    model = make_model("sde")
    same = dict(batch, passage_ids=batch["query_ids"], negative_ids=batch["query_ids"][:, None])
    objective = Contrastive()
    still = objective.embed(model, same)
    chex.assert_trees_all_close(still.query, still.passage, still.negatives[:, 0], atol=1e-6)
    query, passage, negatives = objective.embed(model, same, jax.random.key(0))
    for a, b in itertools.combinations((query, passage, negatives[:, 0], still.query), 2):
        assert np.abs(a - b).max() > 0.05
    again = objective.embed(model, same, jax.random.key(0))
    chex.assert_trees_all_equal(again.passage, passage)
    assert np.abs(objective.embed(model, same, jax.random.key(1)).passage - passage).max() > 0.05


LOSS = functools.partial(in_batch_softmax, temperature=0.05, bidirectional=False)


def batch_of_clozes(rows: int = 8) -> dict[str, jax.Array]:
    own = jnp.arange(rows, dtype=jnp.int32)
    return {
        "sentence_ids": make_texts(rows, seed=1)[:, None],
        "context_ids": make_texts(rows, seed=2)[:, None],
        "whole_ids": make_texts(rows, seed=3),
        "passage_key": jnp.stack([own, own], axis=1),
    }


@pytest.mark.parametrize("keep", [0.0, 1.0, 0.3])
def test_the_share_of_icts_passages_that_stay_whole(keep):
    seen = []

    class Model:
        def encode_together(self, texts):
            seen.extend(ids for ids, _, _ in texts)
            assert [tower for _, tower, _ in texts] == ["query", "passage"]
            return [jnp.zeros((len(ids), 4), jnp.float32) for ids, _, _ in texts]

    batch = batch_of_clozes(2000)
    ICT(keep=keep).embed(Model(), batch, jax.random.key(0))
    whole = (np.asarray(seen[1]) == np.asarray(batch["whole_ids"])).all(1)
    assert whole.mean() == pytest.approx(keep, abs=0.04)
    assert (np.asarray(seen[1]) == np.asarray(batch["context_ids"][:, 0])).all(1)[~whole].all()
    assert (seen[0] == batch["sentence_ids"][:, 0]).all()
    ICT(keep=keep).embed(Model(), batch, None)  # in evaluation (no key) no whole passage is used
    assert (seen[3] == batch["context_ids"][:, 0]).all()


def test_icts_loss_is_the_softmax_over_the_batchs_passages():
    model, batch = unlabelled.make_model(dropout=0.0), batch_of_clozes()
    loss, metrics = ICT(loss=LOSS, keep=0.0)(model, batch, jax.random.key(0))
    query = model.encode(batch["sentence_ids"][:, 0], tower="query")
    passage = model.encode(batch["context_ids"][:, 0], tower="passage")
    np.testing.assert_allclose(loss, LOSS(query, passage)[0], rtol=1e-5)
    assert set(metrics) >= {"accuracy", "positive_similarity"}
    twins = batch | {"passage_key": batch["passage_key"].at[1].set(batch["passage_key"][0])}
    assert ICT(loss=LOSS, keep=0.0)(model, twins, jax.random.key(0))[0] < loss - 0.01


@pytest.mark.slow
def test_icts_gradients_reach_the_encoder_and_neither_chunks_nor_devices_change_numbers():
    model, batch, key = unlabelled.make_model(dropout=0.0), batch_of_clozes(), jax.random.key(3)
    plain, cached = ICT(loss=LOSS, keep=0.5), ICT(loss=LOSS, keep=0.5, chunks=2)
    expected = value_and_grad(plain, model, None, batch, key)
    assert all(np.abs(g).max() > 1e-7 for n, g in expected[2].items() if "attention.key.bias" not in n)
    loss, _, gradients, _ = value_and_grad(on_mesh(cached), model, None, batch, key)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[2][name], atol=1e-4, err_msg=name)
