"""SimCSE and ConSERT: the two views, and the losses over them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.losses.nt_xent import nt_xent
from jaxir.objectives.consert import ConSERT, cut_features, cut_tokens, drop_numbers, shuffle_tokens
from jaxir.objectives.simcse import SimCSE
from tests.objectives.unlabelled import (
    CLS,
    SEP,
    batch_of,
    make_model,
    make_texts,
    on_mesh,
    value_and_grad,
)

AUGMENTATIONS = ("token_shuffling", "token_cutoff", "feature_cutoff", "embedding_dropout")


def test_simcse_is_equation_3_1_over_two_dropout_masks():
    model, ids, key = make_model(), make_texts(), jax.random.key(3)
    loss, metrics, gradients, _ = value_and_grad(SimCSE(), model, None, batch_of(ids), key)
    first, second = jax.random.split(key)
    encode = nnx.jit(lambda model, key: model.encode(ids, tower="passage", key=key))
    x, y = (np.asarray(encode(model, k), np.float64) for k in (first, second))
    assert np.abs(x - y).max() > 0.05
    s = x @ y.T / 0.05
    expected = -np.mean([s[i, i] - np.log(np.exp(s[i]).sum()) for i in range(len(x))])
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert set(metrics) >= {"accuracy", "positive_similarity"} and metrics["positive_similarity"] < 0.999
    moved = {name for name, g in gradients.items() if np.abs(g).max() > 1e-6}
    assert {n for n in gradients if n not in moved} <= {n for n in gradients if "attention.key.bias" in n}


def test_without_a_key_both_views_are_the_text():
    model, ids = make_model(), make_texts()
    for objective in (SimCSE(), ConSERT()):
        one, again = (objective(model, batch_of(ids))[1] for _ in range(2))
        assert one["positive_similarity"] == pytest.approx(1.0, abs=1e-5)
        assert one == again


def test_a_text_that_comes_twice_is_no_negative_of_itself():
    model, ids, key = make_model(), make_texts(), jax.random.key(3)
    twice = batch_of(ids.at[1].set(ids[0]))
    masked = twice | {"text_key": twice["text_key"].at[1].set(twice["text_key"][0])}
    loss, apart = (SimCSE()(model, batch, key)[0] for batch in (masked, twice))
    assert loss < apart - 0.01


@pytest.mark.slow
def test_chunks_and_devices_do_not_change_the_numbers():
    """With almost no dropout ConSERT is deterministic, so chunks change nothing."""
    model, batch, key = make_model(), batch_of(make_texts()), jax.random.key(0)
    nothing = {"first": ("embedding_dropout",), "second": (), "embedding_dropout": 1e-9}
    plain = ConSERT(**nothing, loss=functools.partial(nt_xent, temperature=0.05))
    expected = value_and_grad(plain, model, None, batch, key)
    loss, _, gradients, _ = value_and_grad(on_mesh(ConSERT(**nothing, chunks=4)), model, None, batch, key)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[2][name], atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_devices_draw_the_same_random_numbers():
    model, batch, key = make_model(), batch_of(make_texts()), jax.random.key(5)
    for objective in (SimCSE(), ConSERT(first=AUGMENTATIONS[:2], second=AUGMENTATIONS[2:])):
        one, four = (value_and_grad(f, model, None, batch, key) for f in (objective, on_mesh(objective)))
        np.testing.assert_allclose(four[0], one[0], rtol=1e-5)
        for name, gradient in one[2].items():
            np.testing.assert_allclose(four[2][name], gradient, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_augmentation_acts_alone_and_the_encoders_dropout_is_off(name):
    model, ids = make_model(dropout=0.5), make_texts()
    plain = model.encode(ids, tower="passage")
    keys = jax.random.split(jax.random.key(1), 20)

    def view(key):
        seen = ConSERT(first=(name,), second=()).views(ids, key)
        return [model.encode(v.ids, tower="passage", key=v.key, edit=v.edit) for v in seen]

    firsts, seconds = (np.asarray(x) for x in jax.jit(jax.vmap(view))(keys))
    np.testing.assert_allclose(seconds, np.broadcast_to(plain, seconds.shape), atol=1e-5)
    assert np.abs(firsts - np.asarray(plain)).max(axis=(1, 2)).min() > 0.01
    assert np.abs(firsts[0] - firsts[1]).max() > 0.01


def test_each_view_has_random_numbers_of_its_own():
    ids = make_texts(rows=50)
    one, two = ConSERT(first=["token_shuffling"], second=["token_shuffling"]).views(ids, jax.random.key(0))
    assert (one.ids != two.ids).any(1).mean() > 0.5
    one, two = ConSERT(first=["feature_cutoff"], second=["feature_cutoff"]).views(ids, jax.random.key(0))
    x = jnp.ones((*ids.shape, 40))
    assert (one.edit(x) != two.edit(x)).any((1, 2)).mean() > 0.5


def test_shuffling_keeps_special_tokens_and_draws_every_order():
    ids = make_texts(rows=50)
    found = np.asarray(jax.jit(shuffle_tokens)(ids, jax.random.key(0)))
    for before, after in zip(np.asarray(ids), found, strict=True):
        last = (before != 0).sum() - 1
        assert after[0] == CLS and after[last] == SEP and not after[last + 1 :].any()
        assert sorted(before) == sorted(after)
    assert (found != np.asarray(ids)).any(1).mean() > 0.8
    # Each order is as likely as another: of three words, each of six.
    three = jnp.tile(jnp.asarray([[CLS, 7, 8, 9, SEP, 0]], jnp.int32), (6000, 1))
    orders = np.asarray(jax.jit(shuffle_tokens)(three, jax.random.key(1)))[:, 1:4]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6 and np.abs(counts - 1000).max() < 120


def test_the_shares_that_are_cut():
    mask = jnp.arange(20)[None] < jnp.asarray([20, 10, 3])[:, None]
    x = jnp.ones((3, 20, 30), jnp.float32)
    zero = np.asarray(cut_tokens(x, mask, key=jax.random.key(0), share=0.15)) == 0
    assert (zero.all(2) == zero.any(2)).all()
    assert (zero.all(2) & np.asarray(mask)).sum(1).tolist() == [3, 2, 0]  # cuts round(.15 n) tokens
    zero = np.asarray(cut_features(x, mask, key=jax.random.key(0), share=0.2)) == 0
    assert (zero.all(1) == zero.any(1)).all() and zero.all(1).sum(1).tolist() == [6, 6, 6]
    assert (zero[0] != zero[1]).any()
    full = jnp.full((50, 20, 30), 2.0, jnp.float32)
    dropped = np.asarray(drop_numbers(full, jnp.ones((50, 20), bool), key=jax.random.key(0), rate=0.2))
    assert set(np.unique(dropped)) == {0.0, 2.0} and (dropped == 0).mean() == pytest.approx(0.2, abs=0.01)
