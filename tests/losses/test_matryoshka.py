"""Matryoshka over every loss of vectors equals the sum over dimensions, each computed by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses.bce import bce
from jaxir.losses.distillation import kl_distillation, margin_mse
from jaxir.losses.gist import gist
from jaxir.losses.hinges import margin, triplet
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.matryoshka import matryoshka
from jaxir.losses.nt_xent import nt_xent
from jaxir.losses.pair import pair
from jaxir.losses.samtone import samtone
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.distillation import SCORES, Distillation
from tests.losses.loss_cases import EMBEDDINGS, KEYS, make_case, to_jax, with_guide
from tests.objectives.bags import Bags
from tests.objectives.test_gradient_cache import assert_same, value_and_grad
from tests.objectives.unlabelled import batch_of_pairs

GUIDED = (*KEYS, "guide")
LOSSES = [  # each loss, and the arguments that it reads besides vectors
    *((loss, GUIDED) for loss in (in_batch_softmax, nt_xent, pair, gist, bce, margin, triplet)),
    (functools.partial(samtone, same_tower="both"), GUIDED),
    *((loss, SCORES) for loss in (margin_mse, kl_distillation)),
]
DIMENSIONS, WEIGHTS = [8, 3], [1.0, 0.5]


@pytest.mark.slow
def test_every_loss_is_summed_over_dimensions():
    case = with_guide(make_case(width=8))
    case |= {"passage_score": np.ones(6), "negative_scores": np.sin(np.arange(12)).reshape(6, 2)}
    case = to_jax(case)

    vectors = [case[name] for name in EMBEDDINGS]

    def of(loss, others):
        parts = []
        for dimension in DIMENSIONS:
            cut = (x[..., :dimension] for x in vectors)
            parts.append(loss(*(x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in cut), **others)[0])
        wrapped = functools.partial(matryoshka, loss=loss, dimensions=DIMENSIONS, weights=WEIGHTS)
        value, metrics = wrapped(*vectors, **others)
        return value, [metrics[f"loss_at_{dimension}"] for dimension in DIMENSIONS], parts

    every = jax.jit(lambda: [of(loss, {name: case[name] for name in names}) for loss, names in LOSSES])
    for value, found, parts in every():
        np.testing.assert_allclose(value, np.dot(WEIGHTS, parts), rtol=1e-5)
        np.testing.assert_allclose(found, parts, rtol=1e-4, atol=1e-6)
        assert parts[0] != parts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loss"),
    [(Contrastive, functools.partial(samtone, block_size=3)), (Distillation, kl_distillation)],
)
def test_chunks_change_nothing_under_matryoshka(kind, loss):
    loss = functools.partial(matryoshka, loss=loss, dimensions=[32, 8])
    model, batch = Bags(0.0), batch_of_pairs(8)
    if kind is Distillation:
        batch |= {"passage_score": jnp.ones(8), "negative_scores": jnp.sin(jnp.arange(16.0)).reshape(8, 2)}
    direct, cached = (value_and_grad(kind(loss=loss, chunks=chunks), model, batch) for chunks in (1, 4))
    assert_same(cached, direct)
    np.testing.assert_allclose(direct[0], direct[1]["loss_at_32"] + direct[1]["loss_at_8"], rtol=1e-6)
