"""DiffCSE: gradients, devices and chunks of every variant."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.simcse import SimCSE
from tests.objectives.tiny_diffcse import WithoutDropout, diffcse, made, pairs, with_next
from tests.objectives.unlabelled import (
    batch_of,
    gradients_of,
    make_model,
    make_texts,
    on_mesh,
    value_and_grad,
)

VARIANTS = {
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


def batch_for(objective, rows=8):
    ids = make_texts(rows=rows)
    return pairs(ids) if type(objective.contrastive) is Contrastive else with_next(ids)


@pytest.mark.parametrize(
    "name", [n if n == "diffcse" else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS]
)
def test_gradients_reach_all_but_the_generator_and_devices_change_nothing(name):
    objective, model = VARIANTS[name], make_model()
    auxiliary, batch, key = made(objective, model), batch_for(objective), jax.random.key(2)
    one = value_and_grad(objective, model, auxiliary, batch, key)
    four = value_and_grad(on_mesh(objective), model, auxiliary, batch, key)
    np.testing.assert_allclose(four[0], one[0], rtol=1e-5)
    generated = [n for n in one[3] if n.startswith("generator.")]
    assert bool(generated) == bool(objective.frozen)
    assert all((one[3][n] == 0).all() for n in generated)
    for before, after in zip(one[2:], four[2:], strict=True):
        for path, gradient in before.items():
            still = path.startswith("generator.") or ".mean" in path or ".var" in path
            if not still and "key.bias" not in path:
                assert np.abs(gradient).max() > 1e-9, path
            np.testing.assert_allclose(after[path], gradient, atol=3e-4, err_msg=path)


def test_the_discriminator_alone_reaches_the_encoder_through_the_vector():
    model, batch, key = make_model(dropout=0.0), batch_of(make_texts()), jax.random.key(2)
    # With this weight, a gradient from elsewhere would be larger than the bound.
    objective = diffcse(contrastive=WithoutDropout(), contrastive_weight=0.0, weight=1e-20)
    auxiliary = made(objective, model)
    _, reached = gradients_of("model", objective, model, auxiliary, batch, key)
    assert all(0 < np.abs(g).max() < 1e-15 for n, g in reached.items() if "key.bias" not in n)
    assert np.abs(reached["encoder.embeddings.token.embedding"]).max() > 1e-25


@pytest.mark.parametrize(
    "name", ["diffcse", *(pytest.param(n, marks=pytest.mark.slow) for n in ("all", "pairs", "positives"))]
)
def test_chunks_change_nothing(name):
    """Without dropout, which differs between chunks."""
    model = make_model(dropout=0.0)
    objective = dataclasses.replace(VARIANTS[name])
    if type(objective.contrastive) is SimCSE:
        objective = dataclasses.replace(objective, contrastive=WithoutDropout())
    auxiliary, batch, key = made(objective, model), batch_for(objective), jax.random.key(2)
    whole = value_and_grad(objective, model, auxiliary, batch, key)
    parts = value_and_grad(dataclasses.replace(objective, chunks=4), model, auxiliary, batch, key)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    for before, after in zip(whole[2:], parts[2:], strict=True):
        for path, gradient in before.items():
            scale = max(1.0, np.abs(gradient).max())
            np.testing.assert_allclose(after[path], gradient, atol=2e-5 * scale, err_msg=path)
