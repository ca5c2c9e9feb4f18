"""T5X checkpoints of all versions, written byte by byte by `t5x_writer`, and damaged ones."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import sentencepiece
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop import model_dir, t5x
from jaxir.interop.model import stored
from jaxir.interop.weights import lazy
from jaxir.runtime.partitioning import MeshConfig
from tests.interop import t5x_writer
from tests.interop.folders import GOLDEN, change

pytestmark = pytest.mark.compiled

TOKENIZER = str(GOLDEN / "t5_1_1")


@pytest.fixture(scope="module")
def encoder() -> dict[str, np.ndarray]:
    return t5x_writer.golden_t5(GOLDEN / "t5_1_1")


@pytest.fixture(scope="module")
def fingerprint() -> str:
    return model_dir.load(f"st:{GOLDEN / 't5_1_1'}").fingerprint


@pytest.mark.parametrize(("name", "version"), [("t5_1_0", 2), ("t5_1_1", 3)])
def test_outputs_are_those_of_the_reference_implementation(name, version, tmp_path):
    params = t5x_writer.golden_t5(GOLDEN / name)
    t5x_writer.write(tmp_path, params, version=version)
    loaded = model_dir.load(f"t5x:{tmp_path}", tokenizer=TOKENIZER)
    golden = np.load(GOLDEN / name / "golden.npz")
    ids, expected = golden["padded_ids"].astype(np.int32), golden["padded_output"]
    output = np.asarray(nnx.jit(lambda m, x: m(x))(loaded.model.encoder, jnp.asarray(ids)))
    assert np.abs(expected).max() > 1.0
    assert np.abs(np.where((ids != 0)[..., None], output - expected, 0.0)).max() < 2e-5
    backbone = loaded.model.config.backbone
    expected = {"t5_1_0": (False, "relu", 4, 8), "t5_1_1": (True, "gelu_tanh", 4, 12)}[name]
    assert (backbone.gated, backbone.activation, backbone.num_heads, backbone.head_dim) == expected


VERSIONS = {
    "2": {"version": 2},
    "2, path on top": {"version": 2, "path_on_top": True},
    "2, all in the index": {"version": 2, "inlined": ("",)},
    "2, nothing but vectors in the index": {"version": 2, "inlined": ("scale",)},
    "3": {"version": 3},
    "3, copied from a bucket": {"version": 3, "in_bucket": True},
    "3, without optimizer": {"version": 3, "optimizer": False},
}


@pytest.mark.parametrize(
    ("version", "brain"), [*((version, True) for version in VERSIONS), ("2", False)], ids=str
)
def test_every_version_and_type_gives_the_same_bits(version, brain, encoder, tmp_path):
    kernel = encoder["encoder/layers_0/mlp/wo/kernel"]
    assert kernel.shape[0] % 29 and kernel.shape[1] % 23, "chunks at the edges must be padded"
    params = {p: v.astype(ml_dtypes.bfloat16) if brain else v for p, v in encoder.items()}
    t5x_writer.write(tmp_path, params, **VERSIONS[version])
    found = model_dir.read(f"t5x:{tmp_path}", tokenizer=TOKENIZER)[0]
    reference = model_dir.read(f"st:{GOLDEN / 't5_1_1'}")[0].params
    assert found.params.keys() == reference.keys()
    for name, value in reference.items():
        read = np.asarray(found.params[name])
        expected = np.asarray(value)
        expected = expected.astype(ml_dtypes.bfloat16).astype(np.float32) if brain else expected
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, expected, err_msg=name)


def test_the_decoder_is_left_out_and_named(encoder, fingerprint, tmp_path, capsys):
    decoder = {"decoder/decoder_norm/scale": np.ones(32, np.float32)}
    decoder["decoder/logits_dense/kernel"] = np.ones((32, 100), np.float32)
    checkpoint = t5x_writer.write(tmp_path, {**encoder, **decoder})
    loaded = model_dir.load(f"t5x:{tmp_path}", tokenizer=TOKENIZER)
    assert capsys.readouterr().err == f"note: {checkpoint}: the decoder (2 arrays) is left out\n"
    assert loaded.fingerprint == fingerprint


@pytest.mark.parametrize(("ids", "rows", "warned"), [(259, 384, False), (320, 2501, True)])
def test_a_tokenizer_much_smaller_than_the_vocabulary(ids, rows, warned, encoder, tmp_path, capsys):
    """ByT5's tokenizer belongs to ByT5's larger table; T5's tokenizer with mT5's table is a mistake."""
    content = json.loads((GOLDEN / "t5_1_1" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary += [[f"piece{i}", -20.0] for i in range(len(vocabulary), ids)]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    table = np.zeros((rows, encoder["token_embedder/embedding"].shape[1]), np.float32)
    checkpoint = t5x_writer.write(tmp_path / "run", encoder | {"token_embedder/embedding": table})
    model_dir.read(f"t5x:{tmp_path}/run", tokenizer=str(tmp_path / "tokenizer"))
    warning = f"warning: {checkpoint}: this tokenizer has {ids} ids, the model {rows:,}: "
    said = capsys.readouterr().err
    assert said.startswith(warning) if warned else said == ""


def test_newest_checkpoint_of_a_run_is_read_unless_one_is_named(encoder, tmp_path):
    for step, factor in ((900, 1.0), (1000, 2.0)):
        params = {path: value * np.float32(factor) for path, value in encoder.items()}
        t5x_writer.write(tmp_path, params, step=step)
    (tmp_path / "checkpoint_2000.tmp-1234").mkdir()
    (tmp_path / "checkpoint_3000").mkdir()  # a checkpoint without an index was never finished
    named = {"": 2.0, "/checkpoint_900": 1.0, "/checkpoint_900/": 1.0, "/checkpoint_1000/checkpoint": 2.0}
    for name, factor in named.items():
        model = model_dir.read(f"t5x:{tmp_path}{name}", tokenizer=TOKENIZER)[0]
        scale = np.asarray(model.params["encoder.norm.scale"])
        np.testing.assert_array_equal(scale, encoder["encoder/encoder_norm/scale"] * np.float32(factor))


@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "files"])
def test_orbax_era_checkpoints(ocdbt, encoder, fingerprint, tmp_path):
    tree = {"state": {"step": np.int32(7)}, "target": t5x_writer.nest(encoder)}
    tree["target"]["decoder"] = {"decoder_norm": {"scale": np.zeros(32, np.float32)}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_7" / "state", tree)
    assert (tmp_path / "checkpoint_7" / "state" / "manifest.ocdbt").exists() == ocdbt
    loaded = model_dir.load(f"t5x:{tmp_path}", tokenizer=TOKENIZER)
    assert loaded.fingerprint == fingerprint


def test_the_first_orbax_layout_with_placeholders(encoder, fingerprint, tmp_path):
    beside = t5x_writer.write(tmp_path / "v3", encoder, version=3)
    state = tmp_path / "run" / "checkpoint_5" / "state"
    shutil.copytree(beside, state)
    index = msgpack.unpackb((state / "checkpoint").read_bytes())
    target = t5x_writer.map_specs(
        index["optimizer"]["target"], lambda s: f"PLACEHOLDER://{s['kvstore']['path'][:-1]}"
    )
    (state / "checkpoint").write_bytes(msgpack.packb({"target": target, "state": {}}))
    loaded = model_dir.load(f"t5x:{tmp_path / 'run'}", tokenizer=TOKENIZER)
    assert loaded.fingerprint == fingerprint
    name = target["token_embedder"]["embedding"].removeprefix("PLACEHOLDER://")
    shutil.move(state / name, tmp_path / "elsewhere")
    for place in ("../../../elsewhere", str(tmp_path / "elsewhere")):
        target["token_embedder"]["embedding"] = f"PLACEHOLDER://{place}"
        (state / "checkpoint").write_bytes(msgpack.packb({"target": target, "state": {}}))
        with pytest.raises(UserError, match=f"{re.escape(place[:60])}.* lies outside of"):
            model_dir.load(f"t5x:{tmp_path / 'run'}", tokenizer=TOKENIZER)


@pytest.mark.parametrize("scan", [False, True])
def test_each_device_gets_its_part_and_no_array_is_read_whole(scan, encoder, tmp_path, monkeypatch):
    t5x_writer.write(tmp_path, encoder, inlined=("scale",))
    model = model_dir.read(f"t5x:{tmp_path}", tokenizer=TOKENIZER)[0]
    config = stored.replace_backbone(model.config, scan_layers=scan)
    model = dataclasses.replace(model, config=config)
    read, original = [], lazy.LazyArray.part

    def spy(self, index, dtype):
        value = original(self, index, dtype)
        read.append((self.shape, value.shape))
        return value

    monkeypatch.setattr(lazy.LazyArray, "part", spy)
    sharded = stored.build(model, MeshConfig(fsdp=2, tensor=2).build())
    monkeypatch.undo()
    layer = sharded.encoder.layers if scan else sharded.encoder.layers[1]
    kernel = layer.mlp.wi_0.kernel[...]
    assert kernel.shape[-2:] == (32, 48)
    assert {s.data.shape[-2:] for s in kernel.addressable_shards} == {(16, 24)}
    parts = [part for whole, part in read if whole == (32, 48)]
    assert len(parts) == 5 * 3 * 4 and set(parts) == {(16, 24)}  # 5 kernels in each of 3 layers, in 4 parts
    whole = stored.params_of(stored.build(model))
    jax.tree.map(np.testing.assert_array_equal, stored.params_of(sharded), whole)


def _index(change):
    def damage(checkpoint):
        path = checkpoint / "checkpoint"
        content = msgpack.unpackb(path.read_bytes())
        change(content)
        path.write_bytes(msgpack.packb(content))

    return damage


def _target(path, value=None):
    """Returns a function that sets an entry of the model in the index to `value`, or removes the entry."""

    def change(content):
        node = content["optimizer"]["target"]
        *above, last = path.split("/")
        for name in above:
            node = node.setdefault(name, {})
        if value is None:
            del node[last]
        else:
            node[last] = value

    return _index(change)


def _bytes(name, content):
    return lambda checkpoint: (checkpoint / name).write_bytes(content)


KERNEL = "target.encoder.layers_1.mlp.wo.kernel"
VECTOR = t5x_writer.inline(np.ones(5, np.float32))
MATRIX = t5x_writer.inline(np.ones((4, 33), np.float32))
DAMAGES = {
    "half an index": (lambda c: os.truncate(c / "checkpoint", 3000), "truncated, or not msgpack"),
    "TensorFlow": (_bytes("checkpoint", b"model_checkpoint_path: 'x'"), "a TensorFlow checkpoint; convert"),
    "no index": (lambda c: (c / "checkpoint").unlink(), "no T5X checkpoint in it"),
    "version": (_index(lambda t: t.update(version=1)), r"of version 2 or 3 \(its version is 1\)"),
    "no model": (_index(lambda t: t["optimizer"].pop("target")), "it holds no model"),
    "decoder only": (
        _index(lambda t: t["optimizer"].update(target={"decoder": {"x": VECTOR}})),
        "it has no encoder, only decoder",
    ),
    "one tower": (_target("left_encoder/encoder_norm/scale", VECTOR), "it has only left_encoder; give"),
    "stacked": (_target("encoder/encoder/mlp/wo/kernel", MATRIX), "its layers are stacked"),
    "unknown": (_target("encoder/side_norm/scale", VECTOR), "it has unknown encoder/side_norm/scale"),
    "missing leaf": (_target("encoder/layers_1/mlp/wi_1/kernel"), "lacks encoder/layers_1/mlp/wi_1/kernel"),
    "missing layer": (_target("encoder/layers_1"), r"it lacks encoder/layers_1/.* and has unknown"),
    "shape": (
        _target("encoder/layers_1/pre_mlp_layer_norm/scale", VECTOR),
        r"pre_mlp_layer_norm/scale has shape \(5,\), but its configuration requires \(32,\)",
    ),
    "heads": (
        _target("encoder/relpos_bias/rel_embedding", t5x_writer.inline(np.ones((5, 32), np.float32))),
        "has 48 columns, not a multiple of 5 heads",
    ),
    "odd leaf": (_target("encoder/encoder_norm/scale", "1.0"), "is not an array of T5X"),
    "outside": (
        _target("encoder/layers_1/mlp/wo/kernel", {"driver": "zarr", "kvstore": {"path": "../x"}}),
        r"checkpoint_1000/checkpoint: '../x' lies outside of",
    ),
    "a link": (
        lambda c: ((c / KERNEL).rename(c.parent / "x"), (c / KERNEL).symlink_to(c.parent / "x")),
        r"kernel' is a link out of",
    ),
    "no array": (lambda c: shutil.rmtree(c / KERNEL), "mlp/wo/kernel cannot be read: .* does not exist"),
    "no chunk": (lambda c: (c / KERNEL / "1.1").unlink(), r"wo/kernel cannot be read: .*1\.1. is missing"),
    "half a chunk": (lambda c: os.truncate(c / KERNEL / "1.1", 40), r"Error reading .*/1\.1.*truncated"),
    "another array": (
        lambda c: change(c / KERNEL / ".zarray", shape=[48, 31]),
        r"mlp/wo/kernel has shape \(48, 31\), not \(48, 32\)",
    ),
}


@pytest.fixture(scope="module")
def whole(encoder, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    t5x_writer.write(directory, encoder)
    return directory


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_t5x_checkpoint_is_refused(damage, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    edit, message = DAMAGES[damage]
    edit(tmp_path / "run" / "checkpoint_1000")
    spec = f"t5x:{tmp_path / 'run'}"
    with pytest.raises(UserError, match=message) as caught:
        model_dir.load(spec, tokenizer=TOKENIZER)
    assert "\n" not in str(caught.value) and str(tmp_path / "run") in str(caught.value)


def test_t5x_tokenizer_comes_from_argument_or_config_and_must_fit(encoder, whole, tmp_path):
    shutil.copy(GOLDEN / "make_golden.py", tmp_path / "words.txt")
    sentencepiece.SentencePieceTrainer.train(
        f"--input={tmp_path}/words.txt --model_prefix={tmp_path}/sp --vocab_size=90 --pad_id=0 --eos_id=1"
        " --unk_id=2 --bos_id=-1 --minloglevel=9 --hard_vocab_limit=false"
    )
    model = tmp_path / "sp.model"
    shutil.copytree(whole, tmp_path / "run")
    spec = f"t5x:{tmp_path / 'run'}"
    with pytest.raises(UserError, match=r"has no tokenizer, .*: convert it with --tokenizer=MODEL"):
        model_dir.load(spec)
    given = model_dir.load(spec, tokenizer=str(model)).tokenizer
    assert given.encode_batch(["model"], max_length=9)[0][-1] == 1
    (tmp_path / "run" / "config.gin").write_text(
        "import seqio\n\n# Parameters for seqio.SentencePieceVocabulary:\n"
        f"seqio.SentencePieceVocabulary.sentencepiece_model_file = \\\n    '{model}'\n"
    )
    assert model_dir.load(spec).tokenizer.fingerprint == given.fingerprint
    table = encoder["token_embedder/embedding"][:50]
    t5x_writer.write(tmp_path / "small", encoder | {"token_embedder/embedding": table})
    for source, tokenizer, message in (
        (spec, tmp_path / "other.model", "no such tokenizer"),
        (spec, tmp_path / "words.txt", r"words\.txt is not a SentencePiece model"),
        (spec, GOLDEN / "roberta", "this tokenizer pads with id 1"),
        (f"hf:{GOLDEN / 'bert'}", model, "bert has its own tokenizer"),
        (f"t5x:{tmp_path / 'small'}", model, "this tokenizer has 90 ids, the model only 50"),
    ):
        with pytest.raises(UserError, match=message):
            model_dir.load(source, tokenizer=str(tokenizer))


def test_t5x_checkpoint_is_described_without_a_tokenizer(whole):
    config, settings = t5x.describe(str(whole))
    assert config == model_dir.load(f"st:{GOLDEN / 't5_1_1'}").model.config
    assert (settings.query_max_length, settings.passage_max_length) == (512, 512)
