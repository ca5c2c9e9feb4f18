"""Weights are bit-identical after a round trip through each format."""

import dataclasses
import json
import os
import re
import shutil
import stat
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import pad_batch
from jaxir.interop import formats, model_dir
from jaxir.interop.huggingface import hf
from jaxir.interop.model import kinds
from tests.interop.folders import GOLDEN, tensors_of

ARCHITECTURES = ["bert", "deberta", "distilbert", "minilm", "modernbert", "roberta", "t5_1_0", "t5_1_1"]


def without_pooler(tensors):
    return {name: value for name, value in tensors.items() if not name.startswith("pooler.")}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hf_to_jaxir_to_hf_is_bit_identical(name, tmp_path):
    encoder = hf.read_encoder(GOLDEN / name)
    hf.write_encoder(tmp_path, encoder.config, encoder.params, pad_id=encoder.pad_id)
    assert_same(without_pooler(tensors_of(GOLDEN / name)), tensors_of(tmp_path))
    again = hf.read_encoder(tmp_path)
    assert again.config == encoder.config and again.pad_id == encoder.pad_id
    before, after = (json.loads((d / "config.json").read_text()) for d in (GOLDEN / name, tmp_path))
    ours = {"position_embedding_type", "sinusoidal_pos_embds", "torch_dtype", "architectures"}
    assert {k: v for k, v in after.items() if k not in ours and k in before} == {
        k: v for k, v in before.items() if k not in ours and k in after
    }


def prefixed(prefix: str, **heads: tuple[int, ...]):
    """Returns a change that prefixes tensors' names and adds heads, as in a checkpoint with these heads."""
    more = {name.replace("__", "."): np.zeros(shape, np.float32) for name, shape in heads.items()}
    return lambda tensors: {prefix + name: value for name, value in tensors.items()} | more


def as_first_berts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {re.sub("LayerNorm.(weight|bias)", lambda m: names[m[0]], name): v for name, v in tensors.items()}


def with_decoder(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = dict(tensors)
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    shapes = {"decoder.final_layer_norm.weight": (32,), "lm_head.weight": (100, 32)}
    return tensors | {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


LABELS = {"cls__predictions__bias": (100,)}
DEBERTA = dict.fromkeys(("lm_predictions__lm_head__dense__weight", "pooler__dense__weight"), (32, 32))
DEBERTA |= {"deberta__embeddings__position_embeddings__weight": (32, 32)}
MODERN = {"head__dense__weight": (32, 32), "head__norm__weight": (32,), "decoder__weight": (100, 32)}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("bert", prefixed("bert.", **LABELS)),
        ("bert", prefixed("encoder.", **LABELS)),
        ("bert", as_first_berts),
        ("roberta", prefixed("roberta.", **LABELS)),
        ("distilbert", prefixed("distilbert.", **LABELS)),
        ("modernbert", prefixed("model.", **MODERN)),
        ("deberta", prefixed("deberta.", **DEBERTA)),
        ("t5_1_1", with_decoder),
    ],
)
def test_checkpoints_of_pretraining_give_their_encoder(name, write, tmp_path):
    shutil.copy(GOLDEN / name / "config.json", tmp_path)
    tensors = write(tensors_of(GOLDEN / name))
    assert not tensors.keys() <= tensors_of(GOLDEN / name).keys()
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert_same(hf.read_encoder(GOLDEN / name).params, hf.read_encoder(tmp_path).params)


def test_sharded_and_half_precision_weights(tmp_path):
    shutil.copytree(GOLDEN / "bert", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    tensors = {
        name: np.asarray(value).astype(jnp.bfloat16 if i % 2 else np.float16)
        for i, (name, value) in enumerate(sorted(tensors_of(GOLDEN / "bert").items()))
    }
    names = sorted(tensors)
    shards = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, part in shards.items():
        # Each file also has outdated copies of tensors; the index names the file to read each tensor from.
        left_behind = {n: np.zeros_like(tensors[n]) for n in (names[0], names[-1]) if n not in part}
        held = {n: tensors[n] for n in part} | left_behind
        safetensors.numpy.save_file(held, tmp_path / "model" / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    params, reference = (hf.read_encoder(d).params for d in (tmp_path / "model", GOLDEN / "bert"))
    for name, value in params.items():
        assert value.dtype == np.float32
        # The tolerance is half of bfloat16's last bit; float16 is finer, except below 6e-5.
        np.testing.assert_allclose(value, reference[name], rtol=2**-8, atol=2**-25)


@pytest.mark.parametrize("name", ["bert", "roberta", "t5_1_1"])
def test_sentence_transformers_to_jaxir_and_back(name, tmp_path):
    source = f"st:{GOLDEN / name}"
    assert cli.main("jaxir.convert:convert", [f"--source={source}", f"--output={tmp_path / 'ours'}"]) == 0
    out = tmp_path / "theirs"
    flags = [f"--model={tmp_path / 'ours'}", "--format=st", f"--output={out}"]
    assert cli.main("jaxir.export:export", flags) == 0
    assert_same(without_pooler(tensors_of(GOLDEN / name)), tensors_of(out))
    if (GOLDEN / name / "2_Dense").exists():
        assert_same(tensors_of(GOLDEN / name / "2_Dense"), tensors_of(out / "2_Dense"))
    first, ours, back = (model_dir.read(s)[0] for s in (source, str(tmp_path / "ours"), f"st:{out}"))
    assert first.config == ours.config == back.config
    assert first.settings == ours.settings == back.settings
    assert first.tokenizer.fingerprint == ours.tokenizer.fingerprint == back.tokenizer.fingerprint
    loaded = [model_dir.load(s) for s in (source, str(tmp_path / "ours"), f"st:{out}")]
    assert len({m.fingerprint for m in loaded}) == 1
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) & 0o044


def vectors(loaded, texts, tower):
    length = getattr(loaded.settings, f"{tower}_max_length")
    batch = jnp.asarray(pad_batch(loaded.tokenizer.encode_batch(texts, max_length=length), length))
    return np.asarray(nnx.jit(lambda m, x: m.encode(x, tower=tower))(loaded.model, batch))


@pytest.mark.parametrize("sharing", ["ade", "ade_spl"])
@pytest.mark.slow
def test_two_towers_become_the_routes_of_one_folder(sharing, tmp_path):
    texts = ["the cat sat", "mice"]
    lengths = {"query_max_length": 8, "passage_max_length": 20}
    loaded = model_dir.load(f"st:{GOLDEN / 't5_1_1'}", sharing=sharing, **lengths)
    table = loaded.model.passage_encoder.token.embedding
    table[...] = table[...] * 1.5
    towers = {t: vectors(loaded, texts, t) for t in ("query", "passage")}
    assert np.abs(towers["query"] - towers["passage"]).max() > 1e-3
    model_dir.save(tmp_path / "ours", loaded.model, loaded.tokenizer, loaded.settings)
    flags = [f"--model={tmp_path / 'ours'}", "--format=st", f"--output={tmp_path / 'out'}"]
    assert cli.main("jaxir.convert:convert", flags) == 0
    both = model_dir.load(f"st:{tmp_path / 'out'}")
    assert both.model.config.sharing == sharing
    assert (both.settings.query_max_length, both.settings.passage_max_length) == (8, 20)
    for tower, expected in towers.items():
        np.testing.assert_array_equal(vectors(both, texts, tower), expected)


def test_hf_export_is_the_encoder_alone_and_refuses_the_rest(tmp_path, capsys):
    flags = ["--to=hf", f"--output={tmp_path / 'out'}"]
    assert cli.main("jaxir.convert:convert", [f"--source=st:{GOLDEN / 'roberta'}", *flags]) == 0
    assert_same(without_pooler(tensors_of(GOLDEN / "roberta")), tensors_of(tmp_path / "out"))
    assert not (tmp_path / "out" / "modules.json").exists()
    flags = ["--to=hf", f"--output={tmp_path / 'other'}"]
    for name, more, message in (
        ("bert", [], "has a projection, which format hf cannot hold"),
        ("roberta", ["--pooling=cls"], "format hf cannot hold the pooling: omit --pooling, or use format st"),
    ):
        assert cli.main("jaxir.convert:convert", [f"--source=st:{GOLDEN / name}", *flags, *more]) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_sentence_transformers_export_notes_its_single_length(tmp_path, capsys):
    loaded = model_dir.load(f"st:{GOLDEN / 'roberta'}", query_max_length=8)
    model_dir.save(tmp_path / "ours", loaded.model, loaded.tokenizer, loaded.settings)
    flags = [f"--model={tmp_path / 'ours'}", "--format=sentence_transformers", f"--output={tmp_path / 'out'}"]
    assert cli.main("jaxir.export:export", flags) == 0
    assert "one maximum length" in capsys.readouterr().err
    assert model_dir.load(f"st:{tmp_path / 'out'}").settings.query_max_length == 24


BOTH = "'query: ' before queries and 'passage: ' before passages; the prompts named 's2s' are lost\n"


@pytest.mark.parametrize(
    ("source", "format", "said"),
    [
        ("hf:{golden}/cross_bert", "st", "'passage: ' before passages\n"),
        ("hf:{golden}/cross_bert", "hf", BOTH),
        ("st:{golden}/roberta", "hf", BOTH),
        ("st:{golden}/roberta", "st", ""),
    ],
)
def test_export_notes_prompts_that_a_folder_cannot_hold(source, format, said, tmp_path, capsys):
    """A reranker made from E5 has E5's prompts, and would give other scores without them."""
    loaded = model_dir.load(source.format(golden=GOLDEN), kind=None)
    named = {"query": "query: ", "passage": "passage: ", "s2s": "Same: "}
    prompts = {"query_prompt": "query: ", "passage_prompt": "passage: ", "named_prompts": named}
    settings = dataclasses.replace(loaded.settings, **prompts)
    model_dir.save(tmp_path / "ours", loaded.model, loaded.tokenizer, settings)
    flags = [f"--model={tmp_path / 'ours'}", f"--format={format}", f"--output={tmp_path / 'out'}"]
    assert cli.main("jaxir.export:export", flags) == 0
    note = f"note: the folder does not store this model's prompts: use it with {said}"
    assert capsys.readouterr().err == (note if said else "")
    there = model_dir.read(f"{format}:{tmp_path / 'out'}", kind=kinds.name_of(loaded.model.config))
    kept = there[0].settings.query_prompt, there[0].settings.passage_prompt
    assert kept == ("query: " if format == "st" else "", "passage: " if not said else "")


# Prints which of torch and transformers are imported, then where they would have come from.
READ = """
import sys
from pathlib import Path
import numpy as np
from jaxir.interop.huggingface import hf
from jaxir.interop.model import kinds
from jaxir.interop import model_dir
for folder in sys.argv[1:-1]:
    assert all(np.asarray(x).size for x in model_dir.read(f"st:{folder}")[0].params.values())
assert any(np.asarray(x).any() for x in hf.read_tensors(Path(sys.argv[-1])).values())
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers"}))
import torch, transformers
print(torch.__file__, transformers.__file__)
"""


@pytest.mark.slow
def test_reading_a_model_imports_neither_torch_nor_transformers(tmp_path):
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path(__file__ + '.imported').touch()\n")
    pickled = GOLDEN / "weights" / "bert" / "torch"  # the same weights in torch's own format
    folders = [GOLDEN / "bert", GOLDEN / "t5_1_1", pickled]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", READ, *folders], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported, places = done.stdout.splitlines()
    assert imported == "[]"
    assert places == f"{tmp_path}/torch.py {tmp_path}/transformers.py", "they would have been seen"


@pytest.mark.parametrize(
    ("name", "to", "weights"),
    [
        ("roberta", "hf", "model.safetensors"),
        ("t5_1_1", "st", "model.safetensors"),
        ("t5_1_1", "t5x", "checkpoint_0/target.encoder.layers_1.mlp.wo.kernel/0.0"),
    ],
)
def test_flipped_bit_in_an_export_is_refused(name, to, weights, tmp_path):
    out = tmp_path / "out"
    formats.convert(f"st:{GOLDEN / name}", out, to)
    (out / "NOTES").write_text("mine")
    source = model_dir.load(f"{to}:{out}")
    path = out / weights
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged: .* has changed since it was written"):
        model_dir.load(f"{to}:{out}")
    content[-100] ^= 1
    path.write_bytes(content)
    assert model_dir.load(f"{to}:{out}").fingerprint == source.fingerprint
