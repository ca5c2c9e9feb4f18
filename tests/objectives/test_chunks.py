"""Gradient caching under objectives of texts that have losses of tokens: the same numbers, less memory."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.models.decoder import VectorDecoder
from jaxir.objectives.clm_autoencoder import CLMAutoencoder
from jaxir.objectives.cpdae import CPDAE
from jaxir.objectives.masked_lm import MaskedLM
from jaxir.objectives.mlm_autoencoder import MLMAutoencoder
from jaxir.objectives.prop import PROP
from jaxir.objectives.seed import Seed
from jaxir.objectives.tsdae import TSDAE
from tests.objectives.unlabelled import FORM, Corpus, batch_of, make_model, make_texts, value_and_grad

DECODER = {"decoder_head_dim": 16, "decoder_layers": 1, "decoder_dropout": 0.0}
OBJECTIVES = {
    "cpdae": CPDAE(),
    "cpdae of vectors": CPDAE(contrast="vectors"),
    "seed": Seed(**DECODER),
    "prop": PROP(margin=0.5),
    "clm": CLMAutoencoder(**DECODER),
    "mlm": MLMAutoencoder(**DECODER),
    "tsdae": TSDAE(**DECODER),
    "masked lm": MaskedLM(),
}


def made(objective, model):
    auxiliary = objective.auxiliary(model, form=FORM, rngs=nnx.Rngs(1))
    if isinstance(objective, CPDAE):
        auxiliary.decoder.out.kernel[...] *= 40  # distributions that differ by more than rounding
    if isinstance(auxiliary, VectorDecoder):
        auxiliary.layers[0].value.kernel[...] *= 40  # tokens that depend on the vector
    objective.read_corpus(auxiliary, Corpus(make_texts(rows=30, seed=5)))
    return auxiliary


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "seed" else pytest.mark.slow) for n in OBJECTIVES],
)
def test_chunks_change_nothing_but_dropout(name):
    """Masks and word sets are drawn before the batch is cut; of dropout each chunk has its own."""
    objective, batch, key = OBJECTIVES[name], batch_of(make_texts()), jax.random.key(2)
    cut = dataclasses.replace(objective, chunks=4)
    model = make_model(dropout=0.0)
    auxiliary = made(objective, model)
    loss, metrics, *gradients = value_and_grad(objective, model, auxiliary, batch, key)
    in_parts, told, *others = value_and_grad(cut, model, auxiliary, batch, key)
    assert told.keys() == metrics.keys() and len(metrics) > 0
    np.testing.assert_allclose(in_parts, loss, rtol=1e-5)
    for metric, value in metrics.items():
        np.testing.assert_allclose(told[metric], value, rtol=1e-5, err_msg=metric)
    for before, after in zip(gradients, others, strict=True):
        assert max(np.abs(gradient).max() for gradient in before.values()) > 1e-2
        for path, gradient in before.items():
            atol = 1e-5 * max(np.abs(gradient).max(), 1e-2)
            np.testing.assert_allclose(after[path], gradient, atol=atol, err_msg=path)

    dropping = make_model(dropout=0.5)
    # Traced each time: what is random in Python would differ too.
    with_dropout, again = (
        nnx.jit(lambda *parts: cut(*parts[:3], auxiliary=parts[3])[0])(dropping, batch, key, auxiliary)
        for _ in range(2)
    )
    assert with_dropout == again and abs(float(with_dropout - loss)) > 2e-5


@pytest.mark.slow
def test_a_chunk_is_all_that_a_step_keeps():
    model, batch, key = make_model(), batch_of(make_texts(rows=64)), jax.random.key(2)
    auxiliary = made(Seed(**DECODER), model)

    def temporary(chunks: int) -> int:
        graphs, states = zip(*(nnx.split(m) for m in (model, auxiliary)), strict=True)

        def loss_of(states):
            model, auxiliary = (nnx.merge(g, s) for g, s in zip(graphs, states, strict=True))
            return Seed(**DECODER, chunks=chunks)(model, batch, key, auxiliary=auxiliary)[0]

        return jax.jit(jax.grad(loss_of)).lower(states).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) < temporary(1) / 2


def test_chunks_that_do_not_divide_the_batch_cost_a_sentence():
    model = make_model()
    with pytest.raises(UserError, match="8 examples cannot be embedded in 3 equal chunks"):
        CPDAE(chunks=3)(model, batch_of(make_texts()), auxiliary=made(CPDAE(), model))
