"""All objectives of texts: gradients, devices, chunks, evaluation, and sums."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxir.models.decoder import VectorDecoder
from jaxir.objectives.clm_autoencoder import CLMAutoencoder
from jaxir.objectives.cpdae import CPDAE
from jaxir.objectives.masked_lm import MaskedLM
from jaxir.objectives.mlm_autoencoder import MLMAutoencoder
from jaxir.objectives.prop import PROP
from jaxir.objectives.seed import Seed
from jaxir.objectives.simcse import SimCSE
from jaxir.objectives.tsdae import TSDAE
from jaxir.objectives.weighted_sum import WeightedSum
from tests.objectives.unlabelled import (
    Corpus,
    batch_of,
    devices_change_nothing,
    made,
    make_model,
    make_texts,
    value_and_grad,
)

SMALL = {"decoder_head_dim": 16, "decoder_layers": 1}
OBJECTIVES = {
    "clm": CLMAutoencoder(**SMALL),
    "mlm": MLMAutoencoder(**SMALL),
    "mlm with attention": MLMAutoencoder(vector="attention", **SMALL),
    "masked lm": MaskedLM(),
    "tsdae": TSDAE(**SMALL),
    "cpdae": CPDAE(),
    "cpdae of vectors": CPDAE(contrast="vectors", temperature=0.05),
    "cpdae with idf": CPDAE(contrast=None, idf=True),
    "seed": Seed(**SMALL),
    "prop": PROP(margin=0.5),
}
CORPUS = Corpus(make_texts(rows=30, seed=5))
FROM_THE_CORPUS = ("p", "kept", "mu", "idf")
TENSOR = {"axes": {"data": 2, "tensor": 2}, "atol": 1e-4, "rtol": 1e-4}


def slow_but(*fast: str) -> list:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES]


@pytest.mark.parametrize("name", slow_but("clm", "masked lm"))
def test_gradients_reach_everything_and_devices_change_nothing(name):
    objective, model = OBJECTIVES[name], make_model(sharing="ade" if name == "prop" else "sde")
    how = TENSOR if name.startswith("cpdae") else {}
    batch, auxiliary = batch_of(make_texts()), made(objective, model, CORPUS)
    key = jax.random.key(2)
    devices_change_nothing(objective, model, auxiliary, batch, key, no_gradient=FROM_THE_CORPUS, **how)


@pytest.mark.parametrize("name", slow_but("seed"))
def test_chunks_change_nothing_but_dropout(name):
    """Masks and word sets are drawn before the batch is cut; dropout differs between chunks."""
    objective, batch, key = OBJECTIVES[name], batch_of(make_texts()), jax.random.key(2)
    if hasattr(objective, "decoder_dropout"):
        objective = dataclasses.replace(objective, decoder_dropout=0.0)
    cut = dataclasses.replace(objective, chunks=4)
    model = make_model(dropout=0.0)
    auxiliary = made(objective, model, CORPUS)
    if isinstance(objective, CPDAE):
        auxiliary.decoder.out.kernel[...] *= 40  # distributions that differ by more than rounding
    if isinstance(auxiliary, VectorDecoder):
        auxiliary.layers[0].value.kernel[...] *= 40  # tokens that depend on the vector
    loss, metrics, *gradients = value_and_grad(objective, model, auxiliary, batch, key)
    in_parts, found, *others = value_and_grad(cut, model, auxiliary, batch, key)
    assert found.keys() == metrics.keys() and len(metrics) > 0
    np.testing.assert_allclose(in_parts, loss, rtol=1e-5)
    for metric, value in metrics.items():
        np.testing.assert_allclose(found[metric], value, rtol=1e-5, err_msg=metric)
    for before, after in zip(gradients, others, strict=True):
        assert max(np.abs(gradient).max() for gradient in before.values()) > 1e-2
        for path, gradient in before.items():
            atol = 1e-5 * max(np.abs(gradient).max(), 1e-2)
            np.testing.assert_allclose(after[path], gradient, atol=atol, err_msg=path)

    dropping = make_model(dropout=0.5)
    # Traced twice, so that randomness at trace time would show.
    with_dropout, again = (
        nnx.jit(lambda *parts: cut(*parts[:3], auxiliary=parts[3])[0])(dropping, batch, key, auxiliary)
        for _ in range(2)
    )
    assert with_dropout == again and abs(float(with_dropout - loss)) > 2e-5


@pytest.mark.slow
def test_a_step_needs_the_memory_of_one_chunk():
    model, batch, key = make_model(), batch_of(make_texts(rows=64)), jax.random.key(2)
    auxiliary = made(OBJECTIVES["seed"], model)

    def temporary(chunks: int) -> int:
        graphs, states = zip(*(nnx.split(m) for m in (model, auxiliary)), strict=True)

        def loss_of(states):
            model, auxiliary = (nnx.merge(g, s) for g, s in zip(graphs, states, strict=True))
            return Seed(**SMALL, chunks=chunks)(model, batch, key, auxiliary=auxiliary)[0]

        return jax.jit(jax.grad(loss_of)).lower(states).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) < temporary(1) / 2


@pytest.mark.parametrize("name", slow_but("clm", "masked lm", "prop"))
def test_evaluation_is_the_same_each_time(name):
    objective, model, batch = OBJECTIVES[name], make_model(), batch_of(make_texts())
    auxiliary = made(objective, model, CORPUS)
    # Traced twice, so that randomness at trace time would show.
    first, second = (
        nnx.jit(lambda *parts: objective(*parts[:2], auxiliary=parts[2])[0])(model, batch, auxiliary)
        for _ in range(2)
    )
    assert first == second > 0


def test_a_sum_adds_weighted_losses():
    """Wang 2022, eq. 3.6."""
    model, batch, key = make_model(), batch_of(make_texts()), jax.random.key(7)
    objective = WeightedSum(
        parts={"own": OBJECTIVES["cpdae with idf"], "contrast": SimCSE()}, weights={"own": 0.5}
    )
    auxiliary = made(objective, model, CORPUS)
    total, metrics = nnx.jit(objective)(model, batch, key, auxiliary=auxiliary)
    np.testing.assert_allclose(total, 0.5 * metrics["own/loss"] + metrics["contrast/loss"], rtol=1e-6)
    assert metrics["own/loss"] > 0.1 and metrics["contrast/loss"] > 0.01
    assert len(set(np.asarray(auxiliary.own.idf[...]))) > 2
