"""Masked language models: logits of the reference implementation, refused folders, heads of objectives."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import PretrainedMaskedLM
from jaxir.objectives.masked_lm import MaskedLM
from jaxir.objectives.pretrained_heads import masked_lm_for
from tests.interop.folders import GOLDEN, change, change_tensors, exchange, tensors_of

NAMES = ["bert", "roberta", "distilbert"]


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN / "mlm_bert", tmp_path / "model")


def source(directory) -> PretrainedMaskedLM:
    return PretrainedMaskedLM(source=f"hf:{directory}")


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(name):
    golden, pad = np.load(GOLDEN / f"mlm_{name}" / "golden.npz"), int(name == "roberta")
    model, _ = source(GOLDEN / f"mlm_{name}").build()
    ids = exchange(golden["ids"], pad)
    assert (ids == 0).any()
    order = exchange(np.arange(golden["logits"].shape[-1]), pad)  # exchanges the vocabulary's ids
    found = np.asarray(nnx.jit(lambda m, x: m(x))(model, jnp.asarray(ids)))
    real = ids != 0
    np.testing.assert_allclose(found[real], golden["logits"][..., order][real], atol=2e-4)
    likely = np.asarray(model.most_likely(jnp.asarray(ids)))
    expected = golden["logits"][..., order].copy()
    expected[..., 0] = -np.inf
    assert (likely[real] == expected.argmax(-1)[real]).all()
    places = np.random.default_rng(0).integers(0, ids.shape[1], (len(ids), 3)).astype(np.int32)
    some = model.most_likely(jnp.asarray(ids), places=jnp.asarray(places))
    np.testing.assert_array_equal(some, np.take_along_axis(likely, places, axis=1))


def test_masked_lm_refuses_unsupported_sources(folder):
    change(folder / "config.json", tie_word_embeddings=False)
    for read, message in (
        (source(GOLDEN / "bert").build, r"no cls.predictions.transform.dense.weight among its weights"),
        (source(GOLDEN / "t5_1_1").outline, "no masked language model has model_type 't5'"),
        (PretrainedMaskedLM(source=str(folder)).outline, "must be given as hf:NAME or hf:DIRECTORY"),
        (source(folder).outline, "own token vectors"),
    ):
        with pytest.raises(UserError, match=message):
            read()


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("bert", ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")),
        ("distilbert", ("vocab_projector.weight",)),
    ],
)
def test_masked_lm_refuses_unequal_tied_copies_and_non_finite_weights(name, copies, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / f"mlm_{name}", tmp_path / "model"))
    tensors = tensors_of(folder)
    table = f"{name}.embeddings.word_embeddings.weight"
    for copy in copies:
        shared = tensors[table if copy.endswith("weight") else copy.replace("decoder.", "")]
        change_tensors(folder, lambda t, copy=copy, value=shared: t.update({copy: value.copy()}))
        source(folder).build()
        change_tensors(folder, lambda t, copy=copy, value=shared: t.update({copy: value + 1}))
        with pytest.raises(UserError, match=rf"{copy} differs from .*, although config\.json says"):
            source(folder).build()
        change_tensors(folder, lambda t, copy=copy: t.pop(copy))
    tensors[table][7, 3] = np.nan
    change_tensors(folder, lambda t: t.update(tensors))
    with pytest.raises(UserError, match=r"model is damaged: encoder\..* has a number that is not finite"):
        source(folder).build()


@pytest.fixture(scope="module")
def encoder():
    return model_dir.load(f"hf:{GOLDEN / 'bert'}")


def form_of(loaded):
    tokenizer = loaded.tokenizer
    return loaded.settings.text_format(mask_id=tokenizer.mask_id, vocabulary=tokenizer.vocabulary)


def test_masked_lm_of_another_vocabulary_or_too_short_is_refused(encoder):
    how = {"form": form_of(encoder), "rngs": nnx.Rngs(0)}
    with pytest.raises(UserError, match="has another vocabulary than the model"):
        masked_lm_for(encoder.model, source(GOLDEN / "mlm_roberta"), length=20, **how)
    with pytest.raises(UserError, match="reads at most 160 tokens, and texts have up to 161"):
        masked_lm_for(encoder.model, source(GOLDEN / "mlm_bert"), length=161, **how)
    assert masked_lm_for(encoder.model, source(GOLDEN / "mlm_distilbert"), length=20, **how)


def test_masked_lm_begins_from_a_folders_own_head(encoder):
    golden = np.load(GOLDEN / "mlm_bert" / "golden.npz")
    begin = MaskedLM(head=source(GOLDEN / "mlm_bert"))
    loaded = model_dir.load(f"hf:{GOLDEN / 'mlm_bert'}")
    head = begin.auxiliary(loaded.model, form=form_of(loaded), rngs=nnx.Rngs(0)).head
    table = loaded.model.encoder.token_table.embedding[...]
    ids = jnp.asarray(golden["ids"])
    logits = head(loaded.model.encoder(ids)) @ table.T + head.bias[...][None, None]
    real = np.asarray(ids) != 0
    np.testing.assert_allclose(np.asarray(logits)[real], golden["logits"][real], atol=2e-4)
    batch = {"text_ids": ids}
    auxiliary = begin.auxiliary(loaded.model, form=form_of(loaded), rngs=nnx.Rngs(0))
    assert np.isfinite(begin(loaded.model, batch, auxiliary=auxiliary)[0])
