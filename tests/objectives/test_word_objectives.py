"""CPDAE and PROP, objectives of words: their losses, gradients, weights of words and drawn word sets."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.features import PADDING_TOKEN, Key, Tokens
from jaxir.losses.samtone import samtone
from jaxir.losses.tokens import over_tokens
from jaxir.losses.word_distributions import bag_of_words, js_softmax, log_normalised_sigmoid
from jaxir.objectives.cpdae import CPDAE, words_of
from jaxir.objectives.prop import PROP
from tests.objectives.unlabelled import (
    CLS,
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
    """Computes the loss from the masked texts, the outputs of decoder and head, and the words' losses."""
    objective, model, ids = VARIANTS[name], make_model(dropout=0.0), make_texts(seed=3)
    auxiliary, key = made(objective, model), jax.random.key(4)
    objective.read_corpus(auxiliary, Corpus(make_texts(rows=30)))
    auxiliary.decoder.out.kernel[...] *= 40  # logits far from 0
    loss, metrics = objective(model, batch_of(ids), key, auxiliary=auxiliary)

    keys, head = jax.random.split(key, 6), auxiliary.masked_lm
    masked = [head.mask(ids, keys[at : at + 2], share=0.15) for at in (0, 2)]
    vectors = [model.encode(m, tower="passage") for m, _ in masked]
    raw = [model.unnormalized().encode(m, tower="passage") for m, _ in masked]
    z = [auxiliary.decoder(v) for v in raw]
    y = jnp.array([[word in text for word in range(WORDS)] for text in Corpus(ids).sets])
    weights = np.ones(WORDS, np.float32)
    if objective.idf:
        texts = Corpus(make_texts(rows=30)).sets
        rarity = [31 / (1 + sum(word in t for t in texts)) for word in range(WORDS)]
        weights = np.log(rarity).astype(np.float32)
        assert len(set(weights)) > 5 and weights.min() >= 0
        assert not any("idf" in path for path, _ in nnx.to_flat_state(nnx.state(auxiliary, nnx.Param)))
    reconstruction = np.mean([bag_of_words(x, y, weights=jnp.asarray(weights))[0] for x in z])
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
    if objective.contrast == "vectors":
        mean, _ = samtone(*vectors, temperature=0.05, bidirectional=False)
    else:
        mean, _ = js_softmax(*map(log_normalised_sigmoid, z))
    contrast = float(mean) * len(ids)
    np.testing.assert_allclose(metrics["contrastive_loss"], contrast, rtol=1e-5)
    np.testing.assert_allclose(loss, reconstruction + np.mean(terms) + 0.1 * contrast, rtol=1e-5)


@pytest.mark.slow
def test_the_contrast_alone_reaches_the_encoder():
    model, batch, key = make_model(), batch_of(make_texts()), jax.random.key(2)
    # The weight is so large that no other loss gives gradients as large.
    objective = CPDAE(weight=1e20)
    _, gradients = gradients_of("model", objective, model, made(objective, model), batch, key)
    for path, gradient in gradients.items():
        if "attention.key.bias" not in path:
            assert np.abs(gradient).max() > 1e12, path


def test_in_evaluation_both_maskings_of_a_text_differ():
    model, batch = make_model(), batch_of(make_texts())
    _, metrics = nnx.jit(CPDAE())(model, batch, auxiliary=made(CPDAE(), model))
    assert metrics["positive_divergence"] > 0


CORPUS = Corpus(make_texts(rows=30, seed=5))


def smoothed(text: list[int], mu: float) -> np.ndarray:
    """P(w | D) of every word, in numpy."""
    everything = [word for other in CORPUS.texts for word in other]
    of_corpus = np.array([everything.count(word) for word in range(WORDS)]) / len(everything)
    return (np.array([text.count(word) for word in range(WORDS)]) + mu * of_corpus) / (len(text) + mu)


def test_prop_takes_its_language_model_from_the_corpus():
    auxiliary = made(PROP(subsampling=0.005), make_model(), CORPUS)
    everything = [word for text in CORPUS.texts for word in text]
    p = np.array([everything.count(word) for word in range(WORDS)]) / len(everything)
    np.testing.assert_allclose(auxiliary.p[...], p, rtol=1e-6)
    np.testing.assert_allclose(auxiliary.mu[...], len(everything) / 30, rtol=1e-6)
    kept = [1.0 if x == 0 else min(1.0, math.sqrt(0.005 / x) + 0.005 / x) for x in p]
    np.testing.assert_allclose(auxiliary.kept[...], kept, rtol=1e-5)
    assert len(set(kept)) > 1 and min(kept) < 1
    assert (np.asarray(made(PROP(subsampling=None), make_model(), CORPUS).kept[...]) == 1).all()
    assert made(PROP(mu=7.0), make_model(), CORPUS).mu[...] == 7
    made(PROP(most_words=14), make_model(), CORPUS)


@pytest.mark.parametrize("subsampling", [None, 0.005])
def test_words_are_drawn_from_the_smoothed_language_model(subsampling):
    objective = PROP(subsampling=subsampling, mu=6.0)
    auxiliary, row = made(objective, make_model(), CORPUS), make_texts(rows=1, seed=3)
    rows = 6000
    sets = jax.jit(lambda i, k: objective.draw(i, auxiliary, k))(jnp.tile(row, (rows, 1)), jax.random.key(0))
    ids, text = np.asarray(sets.ids), [word for word in np.asarray(row)[0].tolist() if word > SEP]
    # Each set is a text, both sets of a document have one size, and sizes are Poisson's without 0.
    sizes = (ids > SEP).sum(-1)
    assert (sizes[:, 0] == sizes[:, 1]).all() and (ids[..., 0] == CLS).all()
    assert (np.take_along_axis(ids, sizes[..., None] + 1, 2) == SEP).all()
    assert ((ids != 0).sum(-1) == sizes + 2).all()
    poisson = np.array([3.0**n / math.factorial(n) for n in range(1, 11)])
    found = np.bincount(sizes[:, 0], minlength=11)[1:] / rows
    np.testing.assert_allclose(found, poisson / poisson.sum(), atol=0.02)
    expected = smoothed(text, 6.0) * np.asarray(auxiliary.kept[...])
    drawn = np.bincount(ids[ids > SEP], minlength=WORDS)
    np.testing.assert_allclose(drawn / drawn.sum(), expected / expected.sum(), atol=0.01)
    assert 0.3 < drawn[sorted(set(text))].sum() / drawn.sum() < 0.9
    # The probability of a set is the product over its words.
    p = smoothed(text, 6.0)
    for n in range(20):
        for which in range(2):
            words = [w for w in ids[n, which].tolist() if w > SEP]
            np.testing.assert_allclose(sets.log_p[n, which], np.log(p[words]).sum(), rtol=1e-4)


@pytest.mark.slow
def test_the_loss_is_the_hinge_over_both_sets_and_a_masked_language_model():
    model, ids, key = make_model(dropout=0.0), make_texts(), jax.random.key(4)
    objective = PROP(margin=0.5)
    auxiliary = made(objective, model, CORPUS)
    loss, metrics = nnx.jit(objective)(model, batch_of(ids), key, auxiliary=auxiliary)
    keys = jax.random.split(key, 5)
    sets = objective.draw(ids, auxiliary, keys[0])
    masked, chosen = auxiliary.masked_lm.mask(ids, keys[1:3], share=0.15)
    encode = nnx.jit(lambda model, ids, tower: model.encode(ids, tower=tower), static_argnums=2)
    document = np.asarray(encode(model, masked, "passage"), np.float64)
    near_document = np.stack([np.asarray(encode(model, sets.ids[:, n], "query")) for n in range(2)], 1)
    terms, right = [], []
    for i in range(len(ids)):
        near = (near_document[i] @ document[i]).tolist()
        first, second = np.asarray(sets.log_p[i])
        if first != second:
            better, worse = near if first > second else near[::-1]
            terms.append(max(0.0, 0.5 - better + worse))
            right.append(better > worse)
    assert len(terms) > 4 and 0 < np.mean(right) < 1
    np.testing.assert_allclose(metrics["word_sets_loss"], np.mean(terms), rtol=1e-4)
    assert metrics["word_sets_accuracy"] == pytest.approx(np.mean(right))

    @nnx.jit
    def of_words(encoder, head):
        return over_tokens(*head.losses(encoder, encoder(masked, key=None), ids, chosen, share=0.15))

    of_masked, _ = of_words(model.encoder, auxiliary.masked_lm)
    np.testing.assert_allclose(loss, np.mean(terms) + of_masked, rtol=1e-5)


def test_equally_probable_sets_have_no_loss():
    """A corpus of one word, so that all sets of a size are equal."""
    ids = jnp.tile(jnp.asarray([[CLS, 7, 7, SEP] + [0] * 8], jnp.int32), (8, 1))
    model = make_model(dropout=0.0)
    auxiliary = made(PROP(), model, Corpus(ids))
    _, metrics = PROP()(model, batch_of(ids), jax.random.key(0), auxiliary=auxiliary)
    assert metrics["word_sets_loss"] == metrics["word_sets_accuracy"] == 0
