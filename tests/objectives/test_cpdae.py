"""CPDAE: the loss, its gradients, and the words' weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.features import PADDING_TOKEN, Key, Tokens
from jaxir.objectives.cpdae import CPDAE, words_of
from tests.objectives.unlabelled import (
    FORM,
    SEP,
    WORDS,
    Corpus,
    batch_of,
    gradients_of,
    made,
    make_model,
    make_texts,
)

VARIANTS = {
    "words": CPDAE(),
    "vectors": CPDAE(contrast="vectors", temperature=0.05),
    "idf": CPDAE(contrast=None, idf=True),
}


def test_cpdae_makes_bags_of_words_from_token_ids():
    assert CPDAE().features(FORM) == {"text_ids": Tokens("text", 12), "text_key": Key("text")}
    ids = make_texts()
    found = np.asarray(words_of(ids, WORDS))
    assert found.shape == (8, WORDS) and not found[:, : SEP + 1].any()
    assert [set(np.flatnonzero(row)) for row in found] == Corpus(ids).sets
    spelt = words_of(jnp.array([[SEP - 1, PADDING_TOKEN, WORDS - 2, SEP, 0]], jnp.int32), WORDS)
    assert np.flatnonzero(spelt[0]).tolist() == [0, WORDS - 2]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_is_equation_6(name):
    """In numpy, from the masked texts and the outputs of the decoder and the head."""
    objective, model, ids = VARIANTS[name], make_model(dropout=0.0), make_texts(seed=3)
    auxiliary, key = made(objective, model), jax.random.key(4)
    objective.read_corpus(auxiliary, Corpus(make_texts(rows=30)))
    auxiliary.decoder.out.kernel[...] *= 40  # logits far from 0
    loss, metrics = objective(model, batch_of(ids), key, auxiliary=auxiliary)

    keys, head = jax.random.split(key, 6), auxiliary.masked_lm
    masked = [head.mask(ids, keys[at : at + 2], share=0.15) for at in (0, 2)]
    vectors = [model.encode(m, tower="passage") for m, _ in masked]
    raw = [model.unnormalized().encode(m, tower="passage") for m, _ in masked]
    z = [np.asarray(auxiliary.decoder(v), np.float64) for v in raw]
    p = [1 / (1 + np.exp(-x)) for x in z]
    y = np.array([[word in text for word in range(WORDS)] for text in Corpus(ids).sets])
    weights = np.ones(WORDS)
    if objective.idf:
        texts = Corpus(make_texts(rows=30)).sets
        weights = np.array([np.log(31 / (1 + sum(word in t for t in texts))) for word in range(WORDS)])
        assert len(set(weights)) > 5 and weights.min() >= 0
    reconstruction = np.mean([(-weights * (y * np.log(x) + (1 - y) * np.log(1 - x))).sum(1) for x in p])
    np.testing.assert_allclose(metrics["reconstruction_loss"], reconstruction, rtol=1e-5)

    terms = []
    for text, chosen in masked:
        hidden = head.head(model.encoder(text, key=None))
        table = model.encoder.token_table.embedding[...]
        x = np.asarray(hidden @ table.T + head.head.bias[...][None, None], np.float64)
        log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
        terms += [-log_p[i, j, ids[i, j]] for i, j in zip(*np.nonzero(np.asarray(chosen)), strict=True)]
    np.testing.assert_allclose(metrics["masked_lm_loss"], np.mean(terms), rtol=1e-5)

    if objective.contrast is None:
        assert "contrastive_loss" not in metrics
        np.testing.assert_allclose(loss, reconstruction + np.mean(terms), rtol=1e-5)
        return
    everything = np.concatenate([x / x.sum(1, keepdims=True) for x in p])
    if objective.contrast == "vectors":
        everything = np.concatenate(vectors).astype(np.float64)
        similarity = everything @ everything.T / 0.05
    else:
        entropy = -(everything * np.log(everything)).sum(1)
        m = (everything[:, None] + everything[None]) / 2
        similarity = (entropy[:, None] + entropy[None]) / 2 + (m * np.log(m)).sum(-1)
    contrast = 0.0
    for i in range(len(ids)):
        others = [np.exp(similarity[i, k]) for k in range(2 * len(ids)) if k != i]
        contrast -= similarity[i, len(ids) + i] - np.log(sum(others))
    np.testing.assert_allclose(metrics["contrastive_loss"], contrast, rtol=1e-5)
    np.testing.assert_allclose(loss, reconstruction + np.mean(terms) + 0.1 * contrast, rtol=1e-5)


def test_the_contrast_alone_reaches_the_encoder():
    model, batch, key = make_model(), batch_of(make_texts()), jax.random.key(2)
    # With this weight no other loss gives gradients as large.
    objective = CPDAE(weight=1e20)
    _, gradients = gradients_of("model", objective, model, made(objective, model), batch, key)
    for path, gradient in gradients.items():
        if "attention.key.bias" not in path:
            assert np.abs(gradient).max() > 1e12, path


def test_in_evaluation_both_maskings_of_a_text_differ():
    model, batch = make_model(), batch_of(make_texts())
    _, metrics = nnx.jit(CPDAE())(model, batch, auxiliary=made(CPDAE(), model))
    assert metrics["positive_divergence"] > 0


def test_the_idf_of_words_is_counted_in_the_corpus_and_not_trained():
    objective, model = CPDAE(idf=True), make_model()
    auxiliary = made(objective, model)
    ids = jnp.asarray([[2, 7, 7, 8, 3, 0], [2, 7, 9, 3, 0, 0], [2, 7, 3, 0, 0, 0]], jnp.int32)
    objective.read_corpus(auxiliary, Corpus(ids))
    found = np.asarray(auxiliary.idf[...])
    assert found[7] == 0 and found[8] == pytest.approx(np.log(2)) == found[9]
    assert found[10] == pytest.approx(np.log(4))
    assert not any("idf" in path for path, _ in nnx.to_flat_state(nnx.state(auxiliary, nnx.Param)))
    assert made(CPDAE(), model).idf is None
