"""A guide masks negatives of every loss, as in loops, sentence-transformers and a dense computation."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses.bce import bce
from jaxir.losses.gist import gist
from jaxir.losses.guide import Guide
from jaxir.losses.hinges import margin, triplet
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.nt_xent import nt_xent
from jaxir.losses.samtone import samtone
from jaxir.runtime.partitioning import MeshConfig
from tests.losses.loss_cases import (
    EMBEDDINGS,
    VARIANTS,
    duplicates,
    hard_negatives_of,
    kept,
    make_case,
    samtone_loops,
    slope_along,
    to_jax,
    with_guide,
)

pytestmark = pytest.mark.compiled
GOLDEN = np.load(Path(__file__).resolve().parent.parent / "golden" / "gist.npz")
NT_XENT = (nt_xent, lambda case, **how: samtone_loops(case, bidirectional=True, same_tower="both", **how) / 2)


def value_and_grad(loss, case, **settings):
    arrays = to_jax(case)
    rest = {name: x for name, x in arrays.items() if name not in EMBEDDINGS}
    of = jax.jit(jax.value_and_grad(lambda x: loss(**x, **rest, **settings), has_aux=True))
    return of({name: arrays[name] for name in EMBEDDINGS if name in arrays})


@pytest.mark.parametrize(
    ("variant", "negatives"),
    [("gist", 0), *((variant, 2) for variant in ("in_batch", "samtone_both", "pair", "gist", "nt_xent"))],
)
def test_the_mask_and_its_gradient_equal_loops(variant, negatives):
    loss, expected, settings = (VARIANTS | {"nt_xent": (*NT_XENT, {})})[variant]
    plain = make_case(negatives=negatives)
    case = with_guide(plain)
    slow = functools.partial(expected, temperature=0.3, **settings)
    assert abs(slow(case) - slow(plain)) > 0.05
    (value, metrics), gradients = value_and_grad(loss, case, temperature=0.3, **settings)
    np.testing.assert_allclose(value, slow(case), rtol=2e-5)
    rng = np.random.default_rng(1)
    for name, gradient in gradients.items():
        direction = rng.normal(size=case[name].shape)
        slope = slope_along(slow, case, name, direction)
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-3, atol=1e-3)
    (blockwise, found), blocks = value_and_grad(loss, case, temperature=0.3, **settings, block_size=4)
    np.testing.assert_allclose(blockwise, value, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(blocks[name], gradient, atol=1e-6, err_msg=name)
    for name, metric in metrics.items():
        np.testing.assert_allclose(found[name], metric, rtol=1e-5, atol=1e-6, err_msg=name)


def negatives_of(case, i, *, passages=True, queries):
    """The similarities of query i to its kept negatives."""
    q, p, found = case["query"], case["passage"], []
    for j in range(len(q)):
        if j != i and not duplicates(case, i, j):
            for name, among in (("passage", p), ("query", q)):
                if (name == "passage" or queries) and kept(case, i, ("query", i), (name, j)):
                    found.append(q[i] @ among[j])
    return np.array([*found, *(q[i] @ hard for hard in hard_negatives_of(case, i))])


@pytest.mark.parametrize("choice", ["hardest", "mean"])
def test_the_mask_of_hinges_equals_loops(choice):
    case = with_guide(make_case())
    terms = []
    for i, (query, passage) in enumerate(zip(case["query"], case["passage"], strict=True)):
        near, others = query @ passage, negatives_of(case, i, queries=True)
        pick = np.max if choice == "hardest" else np.mean
        slack = pick(np.maximum(0, others - near + 0.2)), pick(np.maximum(0, 0.5 - 1 + others))
        terms.append((slack[0], slack[1] + max(0, 1 - near - 0.1)))
    for number, loss in enumerate((triplet, margin)):
        value, _ = loss(**to_jax(case), choice=choice, same_tower=True)
        np.testing.assert_allclose(value, np.mean([term[number] for term in terms]), rtol=1e-5)


def test_the_mask_of_binary_cross_entropy_equals_loops():
    case, log_sigmoid = with_guide(make_case()), lambda x: -np.log1p(np.exp(-x))
    rows = [
        log_sigmoid(case["query"][i] @ case["passage"][i] / 0.3)
        + log_sigmoid(-negatives_of(case, i, queries=True) / 0.3).sum()
        for i in range(len(case["query"]))
    ]
    np.testing.assert_allclose(bce(**to_jax(case), temperature=0.3)[0], -np.mean(rows), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "loss", "count", "share", "less"),
    [
        ("gist", gist, 1, 0.0, 0.0),
        ("gist_absolute", gist, 1, 0.0, 0.1),
        ("gist_relative", gist, 2, 0.3, 0.0),
        ("gist_query", functools.partial(samtone, bidirectional=False), 1, 0.0, 0.0),
        ("gist_query", functools.partial(gist, same_tower="query"), 1, 0.0, 0.0),
        ("in_batch", functools.partial(in_batch_softmax, bidirectional=False), 2, 0.0, 0.0),
    ],
)
def test_equals_sentence_transformers(name, loss, count, share, less):
    """Golden values of GISTEmbedLoss, and of CachedGISTEmbedLoss for two negatives (make_gist.py)."""
    arrays, guide = ([GOLDEN[f"{model} {n}"] for n in EMBEDDINGS] for model in ("model", "guide"))
    arrays, guide = ([*of[:2], of[2][:, :count]] for of in (arrays, guide))
    positive = (guide[0] * guide[1]).sum(1)
    guide = Guide(*map(jnp.asarray, (*guide, positive - less - np.abs(positive) * share)))
    how = {"guide": guide, "temperature": float(GOLDEN["temperature"])}

    def of_unit_vectors(arrays):
        return loss(*(x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in arrays), **how)[0]

    of = jax.jit(jax.value_and_grad(of_unit_vectors))
    value, gradients = of([jnp.asarray(x) for x in arrays])
    np.testing.assert_allclose(value, GOLDEN[name], rtol=1e-6)
    for n, gradient in zip(EMBEDDINGS, gradients, strict=True):
        np.testing.assert_allclose(gradient, GOLDEN[f"{name} {n}"], rtol=1e-5, atol=1e-6, err_msg=n)


@pytest.mark.slow
def test_the_mask_on_a_ring_equals_one_device():
    loss, settings = samtone, {"same_tower": "both"}
    case = to_jax(with_guide(make_case(batch=12, width=8)))
    partitioner = MeshConfig(data=2, fsdp=2).build()
    one = value_and_grad(loss, case, temperature=0.1, **settings)
    sharded = jax.device_put(case, partitioner.sharding(("batch",)))
    with partitioner():
        ring = value_and_grad(loss, sharded, temperature=0.1, **settings, block_size=2)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ring, one)


def test_a_row_whose_negatives_are_all_masked_has_no_loss():
    case = with_guide(make_case())
    case["guide"] = case["guide"]._replace(limit=np.full(6, -2.0))
    for block_size in (None, 4):
        (value, metrics), gradients = value_and_grad(gist, case, block_size=block_size)
        np.testing.assert_allclose([value, metrics["rows_without_negatives"]], [0, 1], atol=1e-6)
        assert all(not np.asarray(gradient).any() for gradient in gradients.values())


@pytest.mark.parametrize("block_size", [None, 4])
def test_a_guide_has_no_gradient_in_blocks_or_in_a_matrix(block_size):
    case = to_jax(with_guide(make_case()))
    of = jax.grad(lambda guide: gist(**case | {"guide": guide}, temperature=0.3, block_size=block_size)[0])
    assert all(not np.asarray(x).any() for x in of(case["guide"]))
