"""Checkpoints for T5X are read without jaxir, and bit-identical with it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from flax import serialization

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import formats, model_dir
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.t5x import checkpoint_files as t5x_files
from jaxir.models.dual_encoder import DualEncoderConfig, Projection
from jaxir.models.t5 import T5Config
from tests.interop import t5x_reader, t5x_writer
from tests.interop.folders import GOLDEN

pytestmark = pytest.mark.compiled

T5 = f"st:{GOLDEN / 't5_1_1'}"
LENGTHS = {"query_max_length": 512, "passage_max_length": 512}


def export(source: str, output: Path, *flags: str) -> int:
    flags = ["--format=t5x", f"--output={output}", *flags]
    return cli.main("jaxir.export:export", [f"--model={source}", *flags])


def test_exported_checkpoint_is_read_without_jaxir(tmp_path, monkeypatch):
    monkeypatch.setattr(t5x_files, "_CHUNK_BYTES", 1000)  # small, so that arrays have several chunks
    assert export(T5, tmp_path / "out") == 0
    checkpoint = tmp_path / "out" / "checkpoint_0"
    found, expected = t5x_reader.load(checkpoint), t5x_writer.golden_t5(GOLDEN / "t5_1_1")
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert len(list((checkpoint / "target.token_embedder.embedding").glob("[0-9]*"))) > 3
    beside = {p.name for p in checkpoint.iterdir() if p.is_dir()}
    assert beside == {
        f"target.{p.replace('/', '.')}"
        for p in expected
        if p.endswith(("kernel", "token_embedder/embedding")) and not p.startswith("projection")
    }
    content = serialization.msgpack_restore((checkpoint / "checkpoint").read_bytes())
    state = content["optimizer"]["state"]
    assert list(state) == ["step"] and state["step"] == 0 and state["step"].dtype == np.int32


@pytest.mark.parametrize(
    ("sharing", "dimension", "scan"),
    [
        ("sde", None, False),
        pytest.param("sde", 8, True, marks=pytest.mark.slow),
        ("ade", 8, False),
        pytest.param("ade", None, True, marks=pytest.mark.slow),
        ("ade_spl", 8, True),
    ],
)
def test_jaxir_to_t5x_to_jaxir_is_bit_identical(sharing, dimension, scan, tmp_path):
    tokenizer, settings = Tokenizer.load(GOLDEN / "t5_1_1"), EncoderSettings(**LENGTHS)
    activation = {"gated": not scan, "activation": "relu" if scan else "gelu_tanh"}
    shape = {"vocab_size": 100, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "head_dim": 4}
    backbone = T5Config(**shape, **activation, mlp_dim=24, scan_layers=scan)
    projection = None if dimension is None else Projection(dimension=dimension)
    config = DualEncoderConfig(backbone=backbone, sharing=sharing, projection=projection)
    rng = np.random.default_rng(0)
    params = {n: rng.normal(size=s).astype(np.float32) for n, s in stored.model_shapes(config).items()}
    model = stored.StoredModel(config=config, params=params, tokenizer=tokenizer, settings=settings)
    model_dir.save(tmp_path / "ours", stored.build(model), tokenizer, settings)
    assert export(str(tmp_path / "ours"), tmp_path / "theirs") == 0
    flags = [f"--source=t5x:{tmp_path / 'theirs'}", f"--output={tmp_path / 'back'}"]
    assert cli.main("jaxir.convert:convert", flags) == 0
    (ours, identity), (back, same) = (model_dir.read(str(tmp_path / name)) for name in ("ours", "back"))
    assert same == identity
    assert back.config == stored.replace_backbone(ours.config, scan_layers=False)
    assert back.params.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(back.params[name]), value, err_msg=name)


def test_the_names_of_two_towers(tmp_path):
    loaded = model_dir.load(T5, sharing="ade_spl")
    model_dir.save(tmp_path / "ours", loaded.model, loaded.tokenizer, loaded.settings)
    assert export(str(tmp_path / "ours"), tmp_path / "out") == 0
    found = t5x_reader.load(tmp_path / "out" / "checkpoint_0")
    one = t5x_writer.golden_t5(GOLDEN / "t5_1_1")
    encoder = {p.removeprefix("encoder/"): v for p, v in one.items() if not p.startswith("projection_layer/")}
    expected = {f"{side}_encoder/{p}": v for side in ("left", "right") for p, v in encoder.items()}
    for prefix in ("", "left_", "right_"):
        expected[f"{prefix}projection_layer/kernel"] = one["projection_layer/kernel"]
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_two_towers_of_t5x_retrieval_whose_table_is_shared(tmp_path):
    one = t5x_writer.golden_t5(GOLDEN / "t5_1_1")
    params = {"token_embedder/embedding": one["token_embedder/embedding"]}
    for side, factor in (("left", 1.0), ("right", 2.0)):
        parts = {p: v for p, v in one.items() if p.startswith(("encoder/", "projection_layer/"))}
        params |= {f"{side}_{p}": v * np.float32(factor) for p, v in parts.items()}
    t5x_writer.write(tmp_path, params)
    model = model_dir.read(f"t5x:{tmp_path}", tokenizer=str(GOLDEN / "t5_1_1"))[0]
    assert model.config.sharing == "ade"
    for tower, factor in (("query", 1.0), ("passage", 2.0)):
        table = np.asarray(model.params[f"{tower}_encoder.token.embedding"])
        np.testing.assert_array_equal(table, one["token_embedder/embedding"])
        kernel = np.asarray(model.params[f"{tower}_projection.kernel"])
        np.testing.assert_array_equal(kernel, one["projection_layer/kernel"] * np.float32(factor))


def _with(tmp_path, **changes):
    model = model_dir.read(T5)[0]
    backbone = stored.replace_backbone(model.config, **changes.pop("backbone", {}))
    config = dataclasses.replace(backbone, **changes)
    model_dir.write(tmp_path / "source", dataclasses.replace(model, config=config))
    return str(tmp_path / "source")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: f"st:{GOLDEN / 'bert'}", "T5X holds only T5 encoders"),
        (lambda p: _with(p, pooling="cls"), "pools by the mean, but this model by 'cls'"),
        (lambda p: _with(p, backbone={"activation": "silu"}), "is 'gelu_tanh' in T5X, but 'silu' in"),
        (lambda p: _with(p, backbone={"relative_max_distance": 64}), "relative_max_distance is 128 in T5X"),
    ],
)
def test_t5x_export_refuses_models_it_cannot_hold(make, message, tmp_path, capsys):
    source = make(tmp_path)
    assert export(source, tmp_path / "out") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_t5x_export_notes_settings_it_does_not_hold(tmp_path, capsys):
    assert export(_with(tmp_path, similarity="dot"), tmp_path / "out") == 0
    assert "does not store this model's similarity dot" in capsys.readouterr().err


def test_optimizer_state_is_refused_without_a_run_or_t5x():
    with pytest.raises(UserError, match="only applies to format t5x"):
        formats.convert(T5, "x", "hf", optimizer_state=True)
    with pytest.raises(UserError, match="is not a training run"):
        formats.convert(T5, "x", "t5x", optimizer_state=True)
