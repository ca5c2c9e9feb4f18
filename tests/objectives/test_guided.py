"""A frozen guide masks negatives: one batch, chunks, devices, Matryoshka, and what is refused."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop.build import PretrainedGuide
from jaxir.losses.gist import gist
from jaxir.losses.matryoshka import matryoshka
from jaxir.models import layers
from jaxir.objectives.guided import Guided
from jaxir.objectives.pretrained_heads import guide_for
from tests.objectives.bags import Bags
from tests.objectives.unlabelled import batch_of_pairs, on_mesh, value_and_grad

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SOURCE = PretrainedGuide(source=f"st:{GOLDEN / 'bert'}")
LOSS = functools.partial(gist, temperature=0.1)


def vectors_of(model, batch):
    """The vectors of queries, passages and all negatives, in float64."""
    of = {name: np.float64(model.encode(batch[f"{name}_ids"], tower=name)) for name in ("query", "passage")}
    negatives = batch["negative_ids"]
    of["negatives"] = np.float64(model.encode(negatives.reshape(-1, negatives.shape[-1]), tower="passage"))
    return of


def by_hand(model, guide, batch, *, limit_of, temperature):
    """GISTEmbed's loss with its mask, in numpy, of a batch whose texts all have different keys."""
    of, by = vectors_of(model, batch), vectors_of(guide, batch)
    rows = len(of["query"])
    limit = limit_of((by["query"] * by["passage"]).sum(1))[:, None]
    itself, positive = np.eye(rows, dtype=bool), (of["query"] * of["passage"]).sum(1) / temperature
    total = np.exp(positive)
    masked = 0
    pairs = [("query", "passage"), ("query", "negatives"), ("query", "query"), ("passage", "passage")]
    for one, two in pairs:
        keep = by[one] @ by[two].T <= limit
        keep &= True if two == "negatives" else ~itself
        masked += (~keep).sum()
        total += np.where(keep, np.exp(of[one] @ of[two].T / temperature), 0).sum(1)
    # 3 * rows masked pairs are a row with itself; of the others, the guide masks some but not all.
    assert 3 * rows + 10 < masked < 4 * rows * rows
    return np.mean(np.log(total) - positive)


@pytest.fixture(scope="module")
def batch():
    batch = batch_of_pairs(8)
    return {name: x for name, x in batch.items() if not name.endswith("_key")}


@pytest.fixture(scope="module")
def models():
    """A model, and another one as its guide, with vectors of another length."""
    return Bags(0.0), nnx.Dict(guide=Bags(0.3, seed=1, width=20))


@pytest.mark.parametrize(("strategy", "margin"), [("absolute", 0.05), ("relative", 0.2)])
def test_the_loss_equals_a_computation_by_hand(models, batch, strategy, margin):
    objective = Guided(guide=SOURCE, loss=LOSS, margin=margin, margin_strategy=strategy)
    model, auxiliary = models
    loss, metrics, of_model, of_guide = value_and_grad(objective, model, auxiliary, batch, None)
    limits = {"absolute": lambda g: g - margin, "relative": lambda g: g - abs(g) * margin}
    expected = by_hand(model, auxiliary["guide"], batch, limit_of=limits[strategy], temperature=0.1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert all(not gradient.any() for gradient in of_guide.values())
    assert any(gradient.any() for gradient in of_model.values())
    assert 0 < metrics["masked_by_guide"] < 1 and 0 < metrics["hard_negatives_masked_by_guide"] < 1


@pytest.mark.parametrize("block_size", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_chunks_and_devices_change_nothing_under_matryoshka(models, batch, block_size):
    """The guide's vectors are never cut; each number of dimensions has the same mask."""
    model, auxiliary = models
    blocks = functools.partial(LOSS, block_size=block_size)
    wrap = functools.partial(matryoshka, dimensions=[32, 8], weights=[1.0, 0.5])
    plain = Guided(guide=SOURCE, loss=functools.partial(wrap, loss=LOSS), margin=0.05)
    other = Guided(guide=SOURCE, loss=functools.partial(wrap, loss=blocks), margin=0.05, chunks=2)
    one = value_and_grad(plain, model, auxiliary, batch, None)
    four = value_and_grad(on_mesh(other), model, auxiliary, batch, None)
    np.testing.assert_allclose(four[0], one[0], rtol=1e-5)
    np.testing.assert_allclose(one[1]["loss_at_32"] + one[1]["loss_at_8"] / 2, one[0], rtol=1e-6)
    guide = plain.guide_of(plain.embed(auxiliary["guide"], batch))
    for dimension in (32, 8):
        vectors = [x[..., :dimension] for x in plain.embed(model, batch)]
        vectors = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in vectors]
        np.testing.assert_allclose(one[1][f"loss_at_{dimension}"], LOSS(*vectors, guide=guide)[0], rtol=1e-5)
    assert abs(one[1]["loss_at_32"] - LOSS(*plain.embed(model, batch))[0]) > 0.01
    for name, gradient in one[2].items():
        np.testing.assert_allclose(four[2][name], gradient, atol=2e-5, err_msg=name)


def test_the_guide_is_frozen_and_never_has_dropout(models, batch):
    model, auxiliary = models
    objective = Guided(guide=SOURCE, loss=LOSS)
    assert objective.frozen == ("auxiliary.guide.*",)
    of = nnx.jit(lambda model, beside, key: objective(model, batch, key, auxiliary=beside)[0])
    assert of(model, auxiliary, jax.random.key(0)) == of(model, auxiliary, None)


def form_of(**changes):
    loaded = SOURCE.build()
    form = loaded.settings.text_format_of(loaded.tokenizer)
    return loaded.model, dataclasses.replace(form, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocabulary": "another"}, "has another vocabulary than the model that is trained"),
        ({"query_prompt": "query: "}, "has the query_prompt 'a dog ', and the trained model 'query: '"),
        ({"passage_length": 10_000}, "reads at most .* tokens, and texts have up to 10000"),
    ],
)
def test_a_guide_that_cannot_read_the_models_tokens_is_refused(changes, sentence):
    model, form = form_of(**changes)
    with pytest.raises(UserError, match=sentence):
        guide_for(model, SOURCE, form=form, rngs=nnx.Rngs(0))


def test_a_plan_needs_no_weights_of_the_guide():
    model, form = form_of()
    outline = nnx.eval_shape(lambda: model.config.make(rngs=nnx.Rngs(0)))
    made = nnx.eval_shape(lambda: guide_for(outline, SOURCE, form=form, rngs=nnx.Rngs(0)))
    assert layers.is_abstract(made)


def test_a_loss_or_an_objective_that_ignores_the_guide_is_refused(models, batch):
    def unaware(query, passage, negatives, *, query_key, passage_key, negative_key):
        raise AssertionError

    with pytest.raises(UserError, match="unexpected keyword argument 'guide'"):
        Guided(guide=SOURCE, loss=unaware)
    objective = Guided(guide=SOURCE, loss=LOSS)  # DiffCSE calls its contrastive part's `loss_of`
    with pytest.raises(UserError, match="cannot be the contrastive part of another objective"):
        objective.loss_of(objective.embed(models[0], batch), batch)
