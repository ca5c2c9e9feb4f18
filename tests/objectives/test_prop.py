"""PROP: the drawn word sets, their probabilities, and the loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.losses.tokens import over_tokens
from jaxir.objectives.prop import PROP
from tests.objectives.unlabelled import (
    CLS,
    SEP,
    WORDS,
    Corpus,
    batch_of,
    made,
    make_model,
    make_texts,
)

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
