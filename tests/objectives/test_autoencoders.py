"""Autoencoders and the masked language model: choice of tokens, masking, and losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.models.dual_encoder import Projection
from jaxir.objectives.clm_autoencoder import CLMAutoencoder
from jaxir.objectives.masked_lm import MaskedLM
from jaxir.objectives.masking import choose_tokens, mask_as_bert, most_chosen
from jaxir.objectives.mlm_autoencoder import MLMAutoencoder
from tests.objectives.unlabelled import (
    CLS,
    MASK,
    SEP,
    WORDS,
    batch_of,
    gradients_of,
    made,
    make_model,
    make_texts,
)

SMALL = {"decoder_head_dim": 16, "decoder_layers": 1}
choose = jax.jit(choose_tokens, static_argnames="share")


def test_the_share_of_words_is_chosen_and_at_least_one():
    ids = jnp.tile(make_texts(rows=40), (50, 1))
    words = (np.asarray(ids) > SEP).sum(1)
    for share in (0.5, 0.8):
        chosen = np.asarray(choose(ids, jax.random.key(0), share=share))
        assert not chosen[np.asarray(ids) <= SEP].any() and (chosen.sum(1) >= 1).all()
        long = words >= 8
        assert chosen[long].sum() / words[long].sum() == pytest.approx(share, abs=0.02)
        assert (np.abs(chosen.sum(1) - share * words)[words > 1] < 1).all()
    nothing = jnp.asarray([[CLS, SEP, 0, 0]], jnp.int32)
    assert not choose(nothing, jax.random.key(0), share=0.8).any()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_words_are_chosen_with_equal_probability_up_to_the_maximum(share):
    for length in (3, 12, 22):
        ids = np.full((20_000, length), 7, np.int32)
        ids[:, 0], ids[:, -1] = CLS, SEP
        chosen = np.asarray(choose(jnp.asarray(ids), jax.random.key(length), share=share))
        words = length - 2
        assert chosen.sum(1).max() == most_chosen(length, share) or share * words % 1 < 1e-3
        rates = chosen[:, 1:-1].mean(0)
        np.testing.assert_allclose(rates, max(share, 1 / words), atol=0.015)


def test_logits_are_computed_at_masked_tokens_only():
    model, batch = make_model(dropout=0.0), batch_of(make_texts())
    auxiliary = made(MaskedLM(), model)
    text = str(
        jax.make_jaxpr(lambda key: MaskedLM()(model, batch, key, auxiliary=auxiliary)[0])(jax.random.key(0))
    )
    assert most_chosen(12, 0.15) == 2
    assert f"f32[8,2,{WORDS}]" in text and f"f32[8,12,{WORDS}]" not in text


def test_masking_follows_berts_shares():
    ids = jnp.full((200, 50), 7, jnp.int32)
    chosen = jnp.arange(50)[None] < jnp.full((200, 1), 40)
    found = np.asarray(mask_as_bert(ids, chosen, jax.random.key(0), mask_id=MASK, vocab_size=WORDS))
    assert (found[:, 40:] == 7).all()
    part = found[:, :40]
    assert (part == MASK).mean() == pytest.approx(0.8 + 0.1 / (WORDS - 1), abs=0.02)
    assert (part == 7).mean() == pytest.approx(0.1 + 0.1 / (WORDS - 1), abs=0.02)
    assert part.min() == 1 and len(np.unique(part)) == WORDS - 1


@pytest.mark.slow
def test_the_clm_autoencoders_loss_is_equation_3_4():
    model, ids = make_model(dropout=0.0), make_texts()
    objective = CLMAutoencoder(**SMALL)
    auxiliary = made(objective, model)
    loss, metrics = objective(model, batch_of(ids), auxiliary=auxiliary)
    vector = model.unnormalized().encode(ids, tower="passage")
    table = model.encoder.token_table
    total = 0.0
    for i, row in enumerate(np.asarray(ids)):
        count = (row != 0).sum()
        for t in range(1, count):  # each token from the tokens before it and the vector only
            hidden = auxiliary(table(ids[i : i + 1, :t]), jnp.ones((1, t), bool), vector[i : i + 1])[0, -1]
            logits = np.asarray(table.embedding[...] @ hidden, np.float64)
            total -= logits[row[t]] - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(loss, total / len(ids), rtol=1e-4)
    assert set(metrics) == {"token_accuracy"}
    by_token = CLMAutoencoder(mean_over="tokens", **SMALL)(model, batch_of(ids), auxiliary=auxiliary)[0]
    targets = float((np.asarray(ids)[:, 1:] != 0).sum())
    np.testing.assert_allclose(by_token, loss * len(ids) / targets, rtol=1e-5)


@pytest.mark.parametrize("vector", ["first", "attention"])
def test_the_mlm_autoencoders_loss_is_equation_3_5(vector):
    model, ids, key = make_model(dropout=0.0), make_texts(), jax.random.key(4)
    objective = MLMAutoencoder(vector=vector, decoder_dropout=0.0, **SMALL)
    auxiliary = made(objective, model)
    loss, metrics = nnx.jit(objective)(model, batch_of(ids), key, auxiliary=auxiliary)
    chosen = np.asarray(choose_tokens(ids, jax.random.split(key, 3)[0], share=0.8))
    assert metrics["tokens_masked"] == pytest.approx(chosen.sum(1).mean())

    @nnx.jit
    def decoded(model, decoder, shown):
        vectors, x = model.unnormalized().encode(ids, tower="passage"), model.encoder.token_table(shown)
        return decoder(x.at[:, 0].set(vectors) if vector == "first" else x, ids != 0, vectors)

    hidden = np.asarray(decoded(model, auxiliary.decoder, jnp.where(chosen, MASK, ids)), np.float64)
    logits = hidden @ np.asarray(model.encoder.token_table.embedding[...]).T
    total = 0.0
    for i, row in enumerate(np.asarray(ids)):
        for m in np.flatnonzero(chosen[i]):
            total -= logits[i, m, row[m]] - np.log(np.exp(logits[i, m]).sum())
    np.testing.assert_allclose(loss, total / len(ids), rtol=1e-4)
    has_attention = any(
        "value" in str(path) and "attention" not in str(path)
        for path, _ in nnx.to_flat_state(nnx.state(auxiliary))
    )
    assert has_attention == (vector == "attention")


def test_vectors_of_another_width_than_the_decoders_are_projected():
    model = make_model(projection=Projection(dimension=8))
    for objective in (CLMAutoencoder(**SMALL), MLMAutoencoder(**SMALL)):
        auxiliary, batch = made(objective, model), batch_of(make_texts())
        loss, gradients = gradients_of("auxiliary", objective, model, auxiliary, batch, jax.random.key(0))
        assert np.isfinite(loss) and all(np.abs(g).max() > 0 for n, g in gradients.items() if "project" in n)
