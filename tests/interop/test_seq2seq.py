"""Generators: transformers' logits, and round trips of folders."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop import formats, model_dir
from jaxir.interop.exports import exported
from jaxir.interop.huggingface import hf_seq2seq
from jaxir.interop.model import identity
from tests.interop.folders import GOLDEN, change, remove_tensors, tensors_of

NAMES = ["seq2seq_1_0", "seq2seq_1_1"]
pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def loaded():
    return {name: model_dir.load(f"hf:{GOLDEN / name}", kind="seq2seq") for name in NAMES}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN / "seq2seq_1_1", tmp_path / "model")


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(loaded, name):
    golden, model = np.load(GOLDEN / name / "golden.npz"), loaded[name].model
    assert (model.head is None) == model.config.tied == model.config.scaled == (name == "seq2seq_1_0")
    source, target = golden["source_ids"], golden["target_ids"]
    found = nnx.jit(lambda model, s, t: model(s, t))(model, jnp.asarray(source), jnp.asarray(target))
    real = (target != 0)[..., None]
    np.testing.assert_allclose(np.where(real, found, 0.0), golden["logits"], atol=1e-5)
    assert golden["logits"].std(axis=-1)[target != 0].min() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_folders_come_out_as_they_went_in(name, tmp_path):
    formats.convert(f"hf:{GOLDEN / name}", tmp_path / "ours", "jaxir", kind="seq2seq")
    formats.convert(str(tmp_path / "ours"), tmp_path / "theirs", "hf")
    before, after = (tensors_of(folder) for folder in (GOLDEN / name, tmp_path / "theirs"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    folders = (tmp_path / "theirs", GOLDEN / name)
    config, theirs = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert {k: theirs[k] for k in config if k in theirs} == {k: v for k, v in config.items() if k in theirs}
    assert config["tie_word_embeddings"] == (name == "seq2seq_1_0")
    ours, again = model_dir.load(str(tmp_path / "ours"), kind="seq2seq"), hf_seq2seq.read(tmp_path / "theirs")
    golden = model_dir.load(f"hf:{GOLDEN / name}", kind="seq2seq")
    assert ours.fingerprint == identity.fingerprint(again) == golden.fingerprint
    assert ours.settings == again.settings
    with pytest.raises(UserError, match=r"is a generator, which writes texts \(jaxir\.expand\); format st "):
        formats.convert(str(tmp_path / "ours"), tmp_path / "never", "st")
    with pytest.raises(UserError, match=r"is a generator, which writes texts.*; expected a dual encoder"):
        model_dir.load(str(tmp_path / "ours"))
    formats.convert(f"hf:{GOLDEN / name}", tmp_path / "encoder", "jaxir")
    with pytest.raises(UserError, match=r"is a dual encoder, .*; expected a generator"):
        model_dir.load(str(tmp_path / "encoder"), kind="seq2seq")


def test_tied_tables_are_written_twice_if_outputs_are_not_scaled(folder, tmp_path):
    """Without lm_head transformers 4 would draw one at random, because tie_word_embeddings is false."""
    remove_tensors(folder, "lm_head")
    model, theirs = hf_seq2seq.read(folder), tmp_path / "theirs"
    theirs.mkdir()
    hf_seq2seq.write(theirs, model)
    tensors = tensors_of(theirs)
    np.testing.assert_array_equal(tensors["lm_head.weight"], tensors["shared.weight"])
    assert json.loads((theirs / "config.json").read_text())["tie_word_embeddings"] is False
    again = hf_seq2seq.read(theirs)
    assert again.config.tied and identity.fingerprint(again) == identity.fingerprint(model)


def test_second_table_beside_tied_ones_is_reported(folder, capsys):
    change(folder / "config.json", tie_word_embeddings=True)
    assert hf_seq2seq.read(folder).config.tied
    assert "lm_head.weight is left out: it differs from shared.weight" in capsys.readouterr().err


def test_generators_are_not_exported_as_graphs(loaded):
    with pytest.raises(UserError, match=r"GENERATOR is a generator.*; it cannot be exported as a graph"):
        exported.form_of(exported.ExportedModel.of("GENERATOR", loaded["seq2seq_1_1"]))
