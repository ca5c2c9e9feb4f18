"""SEED: the reach of its decoder, its loss, and its defaults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.models.decoder import DecoderConfig, VectorDecoder
from jaxir.objectives.clm_autoencoder import CLMAutoencoder
from jaxir.objectives.seed import Seed
from tests.objectives.unlabelled import (
    batch_of,
    made,
    make_model,
    make_texts,
)

SMALL = {"decoder_head_dim": 16, "decoder_layers": 1}


@pytest.mark.parametrize(("span", "num_layers"), [(1, 3), (2, 1), (2, 3), (4, 2)])
def test_the_reach_of_the_decoder(span, num_layers):
    """Token t changes the output at t and, per layer, at span - 1 more positions; the vector everywhere."""
    config = DecoderConfig(
        embed_dim=16,
        vector_dim=16,
        num_layers=num_layers,
        head_dim=8,
        mlp_dim=32,
        span=span,
        dropout_rate=0.0,
    )
    decoder = VectorDecoder(config, rngs=nnx.Rngs(0))
    nnx.update(
        decoder, jax.tree.map(lambda x: 10 * x, nnx.state(decoder))
    )  # so that distant tokens have an effect
    x, vector = (jax.random.normal(jax.random.key(n), shape) for n, shape in ((0, (1, 12, 16)), (1, (1, 16))))
    mask = jnp.ones((1, 12), bool)
    before = decoder(x, mask, vector)
    moved = np.abs(decoder(x.at[0, 3].multiply(-1.0), mask, vector) - before).max(-1)[0] > 1e-6
    assert np.flatnonzero(moved).tolist() == list(range(3, min(12, 4 + (span - 1) * num_layers)))
    assert (np.abs(decoder(x, mask, -vector) - before).max(-1) > 1e-4).all()


def test_the_loss_is_a_masked_language_model_and_a_decoder_of_short_reach():
    model, ids, key = make_model(dropout=0.0), make_texts(), jax.random.key(4)
    objective = Seed(span=2, decoder_dropout=0.0, **SMALL)
    auxiliary = made(objective, model)
    loss, metrics = nnx.jit(objective)(model, batch_of(ids), key, auxiliary=auxiliary)
    words, table = auxiliary.masked_lm, model.encoder.token_table
    masked, chosen = words.mask(ids, jax.random.split(key, 4)[:2], share=0.15)

    def log_p(hidden, bias=0.0):
        logits = np.asarray(hidden @ table.embedding[...].T, np.float64) + bias
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    of_masked = log_p(words.head(model.encoder(masked, key=None)), np.asarray(words.head.bias[...]))
    terms = [of_masked[i, j, ids[i, j]] for i, j in zip(*np.nonzero(np.asarray(chosen)), strict=True)]
    np.testing.assert_allclose(metrics["masked_lm_loss"], -np.mean(terms), rtol=1e-5)

    vectors = nnx.jit(lambda model: model.unnormalized().encode(masked, tower="passage"))(model)

    @nnx.jit
    def decoded(decoder, table, others, seen):
        return decoder(table(others), seen, vectors)

    total, count = 0.0, 0
    rows, places = np.asarray(ids), np.arange(ids.shape[1])
    for t in range(1, ids.shape[1]):
        # With one layer and span 2, token t depends on tokens t - 2 and t - 1 and the vector. Earlier tokens
        # are replaced by another text's, later ones are removed.
        others = np.where(places < t - 2, np.roll(rows, -1, axis=0), rows) * (places < t)
        seen = np.broadcast_to(places < t, rows.shape)
        hidden = decoded(auxiliary.decoder, table, others, seen)[:, t - 1]
        for of_next, row in zip(log_p(hidden), rows, strict=True):
            if row[t] != 0:
                total, count = total - of_next[row[t]], count + 1
    np.testing.assert_allclose(metrics["decoder_loss"], total / count, rtol=1e-4)
    np.testing.assert_allclose(loss, metrics["masked_lm_loss"] + metrics["decoder_loss"], rtol=1e-6)


def test_the_defaults_are_the_papers():
    assert (Seed().decoder_layers, Seed().span, Seed().masking) == (3, 2, 0.15)
    assert made(CLMAutoencoder(**SMALL), make_model()).config.span is None
