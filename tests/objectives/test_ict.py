"""The inverse cloze task: the share of whole passages, and the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses.in_batch import in_batch_softmax
from jaxir.objectives.ict import ICT
from tests.objectives.unlabelled import (
    make_model,
    make_texts,
    on_mesh,
    value_and_grad,
)

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
def test_the_share_of_passages_that_stay_whole(keep):
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
    ICT(keep=keep).embed(Model(), batch, None)  # evaluation: none
    assert (seen[3] == batch["context_ids"][:, 0]).all()


def test_the_loss_is_the_softmax_over_the_batchs_passages():
    model, batch = make_model(dropout=0.0), batch_of_clozes()
    loss, metrics = ICT(loss=LOSS, keep=0.0)(model, batch, jax.random.key(0))
    query, passage = (
        np.asarray(model.encode(batch[name][:, 0], tower=tower), np.float64)
        for name, tower in (("sentence_ids", "query"), ("context_ids", "passage"))
    )
    s = query @ passage.T / 0.05
    expected = -np.mean([s[i, i] - np.log(np.exp(s[i]).sum()) for i in range(len(s))])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert set(metrics) >= {"accuracy", "positive_similarity"}
    twins = batch | {"passage_key": batch["passage_key"].at[1].set(batch["passage_key"][0])}
    assert ICT(loss=LOSS, keep=0.0)(model, twins, jax.random.key(0))[0] < loss - 0.01


def test_gradients_reach_the_encoder_and_neither_chunks_nor_devices_change_numbers():
    model, batch, key = make_model(dropout=0.0), batch_of_clozes(), jax.random.key(3)
    plain, cached = ICT(loss=LOSS, keep=0.5), ICT(loss=LOSS, keep=0.5, chunks=2)
    expected = value_and_grad(plain, model, None, batch, key)
    assert all(np.abs(g).max() > 1e-7 for n, g in expected[2].items() if "attention.key.bias" not in n)
    loss, _, gradients, _ = value_and_grad(on_mesh(cached), model, None, batch, key)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[2][name], atol=1e-4, err_msg=name)
