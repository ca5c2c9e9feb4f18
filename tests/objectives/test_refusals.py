"""Refusals of objectives before training, each with one sentence."""

import dataclasses

import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.models.dual_encoder import Projection
from jaxir.objectives.clm_autoencoder import CLMAutoencoder
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.cpdae import CPDAE
from jaxir.objectives.diffcse import DiffCSE
from jaxir.objectives.masked_lm import MaskedLM
from jaxir.objectives.mlm_autoencoder import MLMAutoencoder
from jaxir.objectives.prop import PROP
from jaxir.objectives.simcse import SimCSE
from tests.objectives.tiny_diffcse import Tiny, diffcse
from tests.objectives.unlabelled import FORM, MASK, batch_of, make_model, make_texts

UNMASKED = dataclasses.replace(FORM, mask_id=None)
LONGER = TextFormat(14, 14, mask_id=MASK, vocabulary="words")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DiffCSE(), "needs a masked language model as generator: give --generator"),
        (lambda: diffcse(contrastive=Contrastive(), texts="next"), "changes the pairs themselves"),
        (lambda: diffcse(task="mlm", change="insert"), "set change to 'replace' and .*, not 'insert'"),
        (lambda: diffcse(task="mlm", follow="code"), "has no task 'mlm'"),
        (lambda: Contrastive(chunks=0), "chunks must be a whole number of at least 1 or 'auto', not 0"),
        (
            lambda: CPDAE(chunks=3)(make_model(), batch_of(make_texts()), auxiliary=made(CPDAE())),
            "8 examples cannot be embedded in 3 equal chunks",
        ),
    ],
)
def test_impossible_settings(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


def made(objective, form=FORM, **model):
    return objective.auxiliary(make_model(**model), form=form, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("objective", "form", "model", "sentence"),
    [
        *((x, UNMASKED, {}, "no mask token") for x in (MLMAutoencoder(), MaskedLM(), CPDAE(), diffcse())),
        (CLMAutoencoder(decoder_head_dim=20), FORM, {}, "decoder: head_dim 20 must be even and divide"),
        (SimCSE(), FORM, {"dropout": 0.0}, r"the model has none: give --dropout=0\.1"),
        (diffcse(), FORM, {"dropout": 0.0}, "differ by dropout"),
        (diffcse(generator=Tiny(vocabulary="others")), FORM, {}, "a tiny one has another vocabulary than"),
        (diffcse(change="insert"), LONGER, {}, "reads at most 16 tokens, and texts have up to 18"),
        (
            diffcse(task="mlm", head=Tiny(width=16)),
            FORM,
            {"projection": Projection(dimension=8)},
            "is for vectors of 16 numbers, the encoder has 32",
        ),
        (PROP(most_words=15), FORM, {}, "word sets have up to 17 tokens, and the model reads 16"),
    ],
)
def test_unsuitable_models_and_texts_are_refused(objective, form, model, sentence):
    with pytest.raises(UserError, match=sentence):
        made(objective, form, **model)


def test_settings_without_a_generator_need_none():
    assert DiffCSE(change="delete") and DiffCSE(task="mlm") and DiffCSE(weight=0.0)
    assert SimCSE().auxiliary(make_model(), form=FORM, rngs=None) is None
