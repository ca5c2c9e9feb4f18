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
from jaxir.objectives.pretrained_heads import head_for, masked_lm_for
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
    missing = "no cls.predictions.decoder.weight among its weights, although config.json says"
    for read, message in (
        (source(GOLDEN / "bert").build, r"no cls.predictions.transform.dense.weight among its weights"),
        (source(GOLDEN / "t5_1_1").outline, "no masked language model has model_type 't5'"),
        (PretrainedMaskedLM(source=str(folder)).outline, "must be given as hf:NAME or hf:DIRECTORY"),
        (source(folder).build, missing),
    ):
        with pytest.raises(UserError, match=message):
            read()


@pytest.mark.parametrize(
    ("name", "decoder"), [("bert", "cls.predictions.decoder"), ("distilbert", "vocab_projector")]
)
def test_copies_of_the_token_vectors_are_tied_only_if_equal(name, decoder, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / f"mlm_{name}", tmp_path / "model"))
    table = tensors_of(folder)[f"{name}.embeddings.word_embeddings.weight"]
    ids = jnp.asarray(np.load(GOLDEN / f"mlm_{name}" / "golden.npz")["ids"])

    def logits() -> np.ndarray:
        return np.asarray(source(folder).build()[0](ids))

    expected = logits()
    change_tensors(folder, lambda t: t.update({f"{decoder}.weight": table.copy()}))
    np.testing.assert_array_equal(logits(), expected)
    assert source(folder).build()[0].head.table is None
    bias = tensors_of(folder)[f"{decoder.removesuffix('.decoder')}.bias"]
    own = {f"{decoder}.weight": 2 * table, f"{decoder}.bias": 2 * bias}
    change_tensors(folder, lambda t: t.update(own))
    np.testing.assert_allclose(logits(), 2 * expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(UserError, match="has its own token vectors or no dense layer"):
        head_for_bert(folder)


def head_for_bert(folder):
    loaded = model_dir.load(f"hf:{GOLDEN / 'mlm_bert'}")
    return head_for(loaded.model, source(folder), form=form_of(loaded), rngs=nnx.Rngs(0))


def test_weights_that_are_not_finite_are_damage(folder):
    def damage(tensors: dict[str, np.ndarray]) -> None:
        tensors["bert.embeddings.word_embeddings.weight"][7, 3] = np.nan

    change_tensors(folder, damage)
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
