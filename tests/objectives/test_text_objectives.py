"""All objectives of texts: gradients, devices, chunks and evaluation."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxir.models.decoder import VectorDecoder
from jaxir.objectives.clm_autoencoder import CLMAutoencoder
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.cpdae import CPDAE
from jaxir.objectives.diffcse import DiffCSE
from jaxir.objectives.masked_lm import MaskedLM
from jaxir.objectives.mlm_autoencoder import MLMAutoencoder
from jaxir.objectives.prop import PROP
from jaxir.objectives.seed import Seed
from jaxir.objectives.simcse import SimCSE
from jaxir.objectives.tsdae import TSDAE
from tests.objectives.tiny_diffcse import WithoutDropout, diffcse, pairs, with_next
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
DIFFCSE = {
    "diffcse": diffcse(),
    "tanh": diffcse(projector="tanh"),
    "next": diffcse(texts="next"),
    "insert": diffcse(change="insert"),
    "delete": diffcse(change="delete"),
    "all": diffcse(change="all"),
    "conditional mlm": diffcse(task="mlm"),
    "corrective": diffcse(task="corrective"),
    "as in the code": diffcse(follow="code"),
    "positives": diffcse(use="positive"),
    "negatives": diffcse(use="negative", change="all"),
    "pairs": diffcse(contrastive=Contrastive(), projector="none"),
}
CORPUS = Corpus(make_texts(rows=30, seed=5))
TENSOR = {"axes": {"data": 2, "tensor": 2}, "atol": 1e-4, "rtol": 1e-4}


def slow_but(*fast: str, names=OBJECTIVES) -> list:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def batch_for(objective):
    ids = make_texts()
    if not isinstance(objective, DiffCSE):
        return batch_of(ids)
    return pairs(ids) if type(objective.contrastive) is Contrastive else with_next(ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but("clm", "masked lm", "diffcse", names=OBJECTIVES | DIFFCSE))
def test_gradients_reach_everything_and_devices_change_nothing(name):
    objective, model = (OBJECTIVES | DIFFCSE)[name], make_model(sharing="ade" if name == "prop" else "sde")
    how = TENSOR if name.startswith("cpdae") else {"atol": 3e-4, "least": 1e-9} if name in DIFFCSE else {}
    auxiliary = made(objective, model, CORPUS)
    assert hasattr(auxiliary, "generator") == (name in DIFFCSE)
    devices_change_nothing(objective, model, auxiliary, batch_for(objective), jax.random.key(2), **how)


CUT = [*OBJECTIVES, "diffcse", "all", "pairs", "positives"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but("seed", "diffcse", names=CUT))
def test_chunks_change_nothing_but_dropout(name):
    """Masks and word sets are drawn before the batch is cut; dropout differs between chunks."""
    objective, key = (OBJECTIVES | DIFFCSE)[name], jax.random.key(2)
    batch, (rtol, least) = batch_for(objective), (2e-5, 1.0) if name in DIFFCSE else (1e-5, 1e-2)
    if hasattr(objective, "decoder_dropout"):
        objective = dataclasses.replace(objective, decoder_dropout=0.0)
    if type(getattr(objective, "contrastive", None)) is SimCSE:
        objective = dataclasses.replace(objective, contrastive=WithoutDropout())
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
        assert max(np.abs(gradient).max() for gradient in before.values()) > (
            1e-4 if name in DIFFCSE else 1e-2
        )
        for path, gradient in before.items():
            atol = rtol * max(np.abs(gradient).max(), least)
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
