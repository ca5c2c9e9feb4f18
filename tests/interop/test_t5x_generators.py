"""Generators from T5X checkpoints that `t5x_writer` wrote, and in checkpoints that `t5x_reader` reads."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.interop import model_dir, t5x
from jaxir.interop.model import identity
from jaxir.models.decoding import Decoding
from tests.interop import t5x_reader, t5x_writer
from tests.interop.folders import GOLDEN

TOKENIZER = str(GOLDEN / "seq2seq_1_1")
NAMES = ["seq2seq_1_0", "seq2seq_1_1"]
INLINED = ("scale", "rel_embedding")
pytestmark = pytest.mark.compiled


def convert(source: str, output: Path, *flags: str) -> int:
    return cli.main("jaxir.convert:convert", [f"--source={source}", f"--output={output}", *flags])


@pytest.mark.parametrize(("name", "version"), [("seq2seq_1_0", 2), ("seq2seq_1_1", 3)])
def test_logits_and_tokens_are_those_of_the_reference_implementation(name, version, tmp_path, capsys):
    t5x_writer.write(tmp_path, t5x_writer.golden_generator(GOLDEN / name), version=version, inlined=INLINED)
    flags = ("--kind=seq2seq", f"--tokenizer={TOKENIZER}")
    assert convert(f"t5x:{tmp_path}", tmp_path / "ours", *flags) == 0
    assert capsys.readouterr().err == ""
    loaded = model_dir.load(str(tmp_path / "ours"), kind="seq2seq")
    model, golden = loaded.model, np.load(GOLDEN / name / "golden.npz")
    assert (model.config.tied, model.config.scaled) == (name == "seq2seq_1_0",) * 2
    source, target = golden["source_ids"], golden["target_ids"]
    found = nnx.jit(lambda model, s, t: model(s, t))(model, jnp.asarray(source), jnp.asarray(target))
    np.testing.assert_allclose(np.where((target != 0)[..., None], found, 0.0), golden["logits"], atol=1e-5)
    how = Decoding(max_new_tokens=golden["greedy"].shape[1])
    tokens = nnx.jit(lambda model, s: model.generate(s, how))(model, jnp.asarray(source))
    np.testing.assert_array_equal(tokens[:, 0], golden["greedy"])
    assert loaded.fingerprint == model_dir.load(f"hf:{GOLDEN / name}", kind="seq2seq").fingerprint
    assert (loaded.settings.passage_max_length, loaded.settings.query_max_length) == (512, 64)


@pytest.mark.parametrize("name", NAMES)
def test_exported_generator_is_read_without_jaxir_and_by_jaxir(name, tmp_path):
    assert convert(f"hf:{GOLDEN / name}", tmp_path / "out", "--to=t5x", "--kind=seq2seq") == 0
    checkpoint = tmp_path / "out/checkpoint_0"
    found, expected = t5x_reader.load(checkpoint), t5x_writer.golden_generator(GOLDEN / name)
    assert found.keys() == expected.keys()
    assert ("decoder/logits_dense/kernel" in found) == (name == "seq2seq_1_1")
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    beside = {p.name for p in checkpoint.iterdir() if p.is_dir()}
    assert beside == {
        f"target.{path.replace('/', '.')}" for path in expected if path.endswith(("kernel", "r/embedding"))
    }
    # Convert to a folder of transformers; the tokenizer is found beside the checkpoint.
    assert convert(f"t5x:{tmp_path}/out", tmp_path / "hf", "--to=hf", "--kind=seq2seq") == 0
    before, after = (model_dir.read(f"hf:{f}", kind="seq2seq")[0] for f in (GOLDEN / name, tmp_path / "hf"))
    assert identity.fingerprint(after) == identity.fingerprint(before)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["architectures"] == ["T5ForConditionalGeneration"]


def test_optimizer_state_is_transposed_with_its_parameter(tmp_path):
    model = model_dir.read(f"hf:{GOLDEN / 'seq2seq_1_1'}", kind="seq2seq")[0]
    slots = {name: {"v": np.asarray(value) ** 2} for name, value in model.params.items()}
    t5x.write(tmp_path / "out", model, step=3, slots=slots)
    index = serialization.msgpack_restore((tmp_path / "out/checkpoint_3/checkpoint").read_bytes())
    states = index["optimizer"]["state"]["param_states"]
    found = t5x_reader.load(tmp_path / "out/checkpoint_3")
    for path, value in found.items():
        state = states
        for name in path.split("/"):
            state = state[name]
        np.testing.assert_array_equal(state["v"], value**2, err_msg=path)


def without(beginning: str):
    def spoil(params):
        kept = {path: value for path, value in params.items() if not path.startswith(beginning)}
        assert len(kept) < len(params)
        return kept

    return spoil


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without("decoder/"), "it has no decoder, only encoder, token_embedder"),
        (without("decoder/layers_"), "it lacks decoder/layers_0"),
        (without("decoder/layers_1/encoder_decoder_attention/key"), "lacks decoder/layers_1/encoder_decod"),
        (lambda p: p | {"decoder/extra/scale": np.ones(3, np.float32)}, "has unknown decoder/extra/scale"),
        (
            lambda p: p | {"decoder/logits_dense/kernel": p["token_embedder/embedding"]},
            r"decoder/logits_dense/kernel has shape \(1\d\d, 32\)",
        ),
    ],
)
def test_t5x_generator_refuses_missing_unknown_or_misshapen_arrays(tmp_path, spoil, sentence):
    params = spoil(t5x_writer.golden_generator(GOLDEN / "seq2seq_1_1"))
    t5x_writer.write(tmp_path, params, inlined=INLINED)
    with pytest.raises(UserError, match=sentence) as error:
        model_dir.read(f"t5x:{tmp_path}", tokenizer=TOKENIZER, kind="seq2seq")
    assert "\n" not in str(error.value)


def test_t5x_export_refuses_generators_that_t5x_computes_differently(tmp_path):
    model = model_dir.read(f"hf:{GOLDEN / 'seq2seq_1_0'}", kind="seq2seq")[0]
    for changes, sentence in (({"scaled": False}, "T5X scales"), ({"eos_id": 2}, "end with token 1")):
        other = dataclasses.replace(model, config=dataclasses.replace(model.config, **changes))
        with pytest.raises(UserError, match=sentence):
            t5x.write(tmp_path / "out", other)
    assert not (tmp_path / "out").exists()
