"""Matryoshka against loops over the paper's equation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses.distillation import margin_mse
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.matryoshka import matryoshka
from tests.losses.loss_cases import EMBEDDINGS, in_batch_loops, make_case, slope_along, to_jax

pytestmark = pytest.mark.compiled
INNER = functools.partial(in_batch_softmax, temperature=0.3)


def loops(case, *, dimensions, weights, normalize=True):
    """Kusupati et al. 2022, eq. 1, with the in-batch softmax for the loss."""
    total = 0.0
    for dimension, weight in zip(dimensions, weights, strict=True):
        cut = {name: case[name][..., :dimension] for name in EMBEDDINGS if case.get(name) is not None}
        if normalize:
            cut = {name: x / np.linalg.norm(x, axis=-1, keepdims=True) for name, x in cut.items()}
        keys = {name: x for name, x in case.items() if name not in EMBEDDINGS}
        total += weight * in_batch_loops(cut | keys, temperature=0.3, bidirectional=True)
    return total


@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_papers_equation(negatives, normalize):
    case = make_case(width=8, negatives=negatives)
    width = case["query"].shape[1]
    settings = {"dimensions": [width, 5, 2], "weights": [1.0, 0.5, 0.25], "normalize": normalize}
    loss, metrics = matryoshka(**to_jax(case), loss=INNER, **settings)
    np.testing.assert_allclose(loss, loops(case, **settings), rtol=2e-5)
    whole, inner = INNER(**to_jax(case))
    assert metrics["loss_at_5"] != metrics["loss_at_2"] != whole
    assert metrics[f"loss_at_{width}"] == whole and metrics["accuracy"] == inner["accuracy"]
    parts = float(whole + metrics["loss_at_5"] / 2 + metrics["loss_at_2"] / 4)
    assert float(loss) == pytest.approx(parts, rel=1e-6)
    assert {f"accuracy_at_{d}" for d in settings["dimensions"]} <= metrics.keys()


CUT = {"dimensions": [6, 3], "weights": [1.0, 2.0]}


@pytest.fixture(scope="module")
def gradients():
    """The gradients of the loss with respect to the embeddings, from one program."""
    arrays = to_jax(make_case(width=8, negatives=2))
    keys = {name: x for name, x in arrays.items() if name not in EMBEDDINGS}
    of = jax.jit(jax.grad(lambda x: matryoshka(**x, **keys, loss=INNER, **CUT)[0]))
    return of({name: arrays[name] for name in EMBEDDINGS})


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_gradient_is_the_slope_of_the_equation(name, gradients):
    case = make_case(width=8, negatives=2)
    direction = np.random.default_rng(1).normal(size=case[name].shape)
    expected = slope_along(lambda c: loops(c, **CUT), case, name, direction)
    assert abs(expected) > 1e-2
    np.testing.assert_allclose(np.sum(np.asarray(gradients[name]) * direction), expected, rtol=1e-3)


def test_default_dimensions_halve_down_to_eight():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 40)), jnp.float32)
    _, metrics = matryoshka(x, x, loss=INNER)
    assert [name for name in metrics if name.startswith("loss_at")] == [f"loss_at_{d}" for d in (40, 20, 10)]
    assert "loss_at_4" in matryoshka(x[:, :4], x[:, :4], loss=INNER)[1]


def test_a_row_of_zeros_has_a_finite_gradient():
    case = to_jax(make_case(negatives=0))
    query = case["query"].at[0, :3].set(0.0)
    gradient = jax.grad(lambda q: matryoshka(q, case["passage"], loss=INNER, dimensions=[3])[0])(query)
    assert np.isfinite(gradient).all() and np.abs(gradient[1]).max() > 0


def test_scores_of_a_teacher_pass_through():
    case = to_jax(make_case(negatives=2))
    of = {name: case[name] for name in EMBEDDINGS}
    scores = {"passage_score": jnp.ones(len(case["query"])), "negative_scores": case["negatives"][..., 0]}
    loss, metrics = matryoshka(**of, **scores, loss=margin_mse, dimensions=[4, 2])
    assert float(loss) == pytest.approx(float(metrics["loss_at_4"] + metrics["loss_at_2"]))
    assert "margin" in metrics and "accuracy_at_4" not in metrics
