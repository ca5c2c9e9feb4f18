import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop.build import FromScratch
from jaxir.interop.exports import exported
from jaxir.interop.huggingface import hf, hf_config
from jaxir.interop.model import stored
from jaxir.models import any_length, backbones
from jaxir.models.bert import BertConfig
from jaxir.models.codec import HuggingFace
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.runtime.partitioning import MeshConfig
from tests.beir_folder import write_folder

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "granite"
PAGE = (ROOT / "docs" / "adding_a_backbone.md").read_text()
SMALL = {"vocab_size": 100, "embed_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
SMALL |= {"mlp_dim": 48, "scan_layers": True}


def run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_pages_backbone_trains_saves_and_loads_from_a_users_file(tmp_path):
    code, recipe = (re.search(rf"```{kind}\n(.*?)^```", PAGE, re.M | re.S)[1] for kind in ("python", "gin"))
    (tmp_path / "granite.py").write_text(code)
    sizes = "".join(f"granite.GraniteConfig.{name} = {value}\n" for name, value in SMALL.items())
    (tmp_path / "granite.gin").write_text(recipe + sizes)
    (tmp_path / "only_import.gin").write_text("from __gin__ import dynamic_registration\nimport granite\n")
    write_folder(tmp_path / "data", train=16)
    pieces = ("granite.gin", "gin/objectives/samtone.gin", "gin/runs/few_steps.gin")
    flags = [*(f"--gin_file={piece}" for piece in pieces), f"--gin.TOKENIZER={ROOT / 'tests/golden/bert'}"]
    flags += ["--gin.DATA=data", "--gin.STEPS=4", "--gin.BATCH_SIZE=8", "--gin.EVAL_EVERY=2"]
    done = run(tmp_path, "jaxir.train", *flags, "--output_dir=run")
    assert done.returncode == 0, done.stderr
    described = json.loads((tmp_path / "run" / "jaxir.json").read_text())["model"]
    assert described["pooling"] == "lasttoken"
    assert (
        described["backbone"].items() >= {"kind": "granite", "module": "granite", "num_kv_heads": 2}.items()
    )

    # Without the import, the error names the module to import.
    done = run(tmp_path, "jaxir.convert", "--model=run", "--output=lost", "--to=jaxir")
    assert done.returncode == 1
    assert re.search(
        "unknown backbone 'granite', known are bert, .*, t5, .*: import granite first", done.stderr
    )
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "lost").exists()

    imported = "--gin_file=only_import.gin"
    done = run(tmp_path, "jaxir.convert", imported, "--model=run", "--output=model", "--to=jaxir")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, "jaxir.convert", imported, "--model=model", "--output=folder", "--to=hf")
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (content["model_type"], content["num_key_value_heads"]) == ("granite", 2)
    compare = (
        "import granite, numpy as np\nfrom jaxir.interop import model_dir\n"
        "(one, _), (two, _) = (model_dir.read(name) for name in ('model', 'hf:folder'))\n"
        "same = one.params.keys() == two.params.keys() and all(\n"
        "    np.array_equal(np.asarray(x), two.params[n]) for n, x in one.params.items())\n"
        "print(len(one.params), same, model_dir.load('model', pooling='mean').model)\n"
    )
    (tmp_path / "compare.py").write_text(compare)
    done = run(tmp_path, "compare")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("20 True DualEncoderModel(granite, 2 layers x 32, mean pooling"), (
        done.stdout
    )


def test_configuration_without_required_fields_is_refused():
    class Bare(backbones.BackboneConfig):
        kind = "bare"
        vocab_size = embed_dim = 4

    with pytest.raises(TypeError, match=r"Bare lacks token_table, num_layers, dtype, remat, scan_layers \("):
        backbones.register(Bare)


def test_configuration_that_is_no_dataclass_is_refused(monkeypatch):
    monkeypatch.setattr(backbones, "_KINDS", dict(backbones._KINDS))

    class Wide(BertConfig):
        kind, hugging_face = "wide", ()
        width: int = 7

    with pytest.raises(TypeError, match=r"Wide is not a frozen dataclass: write @dataclasses\.dataclass\(fr"):
        backbones.register(Wide)
    assert "wide" not in backbones._KINDS
    assert backbones.register(dataclasses.dataclass(frozen=True)(Wide)) is backbones._KINDS["wide"]


def test_pages_backbone_equals_transformers(tmp_path, monkeypatch):
    """The backbone has grouped heads, a causal mask and RoPE; a table reads and writes its weights."""
    (tmp_path / "granite.py").write_text(re.search(r"```python\n(.*?)^```", PAGE, re.M | re.S)[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backbones, "_KINDS", dict(backbones._KINDS))
    monkeypatch.delitem(sys.modules, "granite", raising=False)
    importlib.import_module("granite")
    monkeypatch.delitem(sys.modules, "granite")
    encoder = hf.read_encoder(GOLDEN)
    golden = np.load(GOLDEN / "golden.npz")
    params = {f"encoder.{name}": value for name, value in encoder.params.items()}
    config = DualEncoderConfig(backbone=encoder.config)
    model = stored.build(stored.StoredModel(config=config, params=params, tokenizer=None, settings=None))
    ids = jnp.asarray(golden["ids"])
    output = nnx.jit(lambda encoder, ids: encoder(ids))(model.encoder, ids)
    real = golden["ids"][..., None] != 0
    np.testing.assert_allclose(np.where(real, output, 0), np.where(real, golden["output"], 0), atol=1e-5)
    hf.write_encoder(tmp_path, encoder.config, encoder.params, pad_id=encoder.pad_id)
    before, after = (safetensors.numpy.load_file(place / "model.safetensors") for place in (GOLDEN, tmp_path))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)


LEAKY = """
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.models import layers
from jaxir.models.backbones import BackboneConfig, Encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedConfig(BackboneConfig):
    kind: ClassVar[str] = "mixed"
    token_table: ClassVar[str] = "token"
    vocab_size: int = 20
    embed_dim: int = 8
    num_layers: int = 0
    dtype: str = "float32"
    remat: bool = False
    scan_layers: bool = False
    masked: bool
    beside: str = ""
    window: int = 4

    def make(self, *, rngs):
        return Mixed(self, rngs=rngs)


class Mixed(Encoder):
    def __init__(self, config, *, rngs):
        self.config = config
        how = {"axis": "vocab", "dtype": config.dtype, "init": layers.normal(1.0)}
        self.token = layers.Embedding(config.vocab_size, config.embed_dim, **how, rngs=rngs)
        if config.beside == "array":
            self.scale = jnp.ones(8)
        if config.beside == "state":
            self.scale = nnx.BatchStat(jnp.ones(8))
        if config.beside == "linear":
            self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, ids, *, key=None):
        x = self.token(ids)
        if self.config.beside == "numpy":
            x = x + jnp.asarray(np.arange(ids.shape[1]), x.dtype)[None, :, None]
        if self.config.beside == "linear":
            x = self.linear(x)
        real = (ids != 0)[..., None].astype(x.dtype) if self.config.masked else jnp.ones_like(x[..., :1])
        x = x * real
        mean = x.sum(1, keepdims=True) / jnp.maximum(real.sum(1, keepdims=True), 1.0)
        near = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))[:, 1:]  # the next token's
        if self.config.beside == "pooled":
            return mean[:, 0]
        return layers.constrain_activation(x + near + jax.nn.gelu(mean))
"""


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """The module of a user's file; its backbone is not registered."""
    (tmp_path / "mixed.py").write_text(LEAKY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backbones, "_KINDS", dict(backbones._KINDS))
    monkeypatch.delitem(sys.modules, "mixed", raising=False)
    yield importlib.import_module("mixed")
    monkeypatch.delitem(sys.modules, "mixed")


def test_length_that_numpy_reads_is_warned_of_and_not_exported(mixed, capsys):
    made = [mixed.MixedConfig(masked=True, beside=beside).make(rngs=nnx.Rngs(0)) for beside in ("", "numpy")]
    any_length.warn(made[0])
    assert not capsys.readouterr().err
    any_length.warn(made[1])
    said = capsys.readouterr().err
    assert re.match(r"warning: the backbone 'mixed' .*: mixed.py:\d+ fails", said)
    assert "use jax.numpy" in said
    with pytest.raises(UserError, match="which numpy, int"):
        exported.ExportedModel.of("MODEL", stored.LoadedModel(made[1], None, None, "0"))


@pytest.mark.parametrize("mesh", [None, MeshConfig(data=2, fsdp=2)])
def test_backbone_that_reads_padding_is_refused(mesh, mixed):
    make, partitioner = mixed.MixedConfig, mesh and mesh.build()

    def both(masked):
        config = DualEncoderConfig(backbone=make(masked=masked))
        yield lambda: stored.initialize(config, seed=0, partitioner=partitioner)
        params = stored.params_of(config.make(rngs=nnx.Rngs(0)))
        read = stored.StoredModel(config=config, params=params, tokenizer=None, settings=None)
        yield lambda: stored.build(read, partitioner)

    for build in both(masked=True):
        assert build().encoder.token.embedding[...].any(axis=1).all(), "also the row of padding is kept"
    for build in both(masked=False):
        with pytest.raises(UserError, match=r"^mixed\.Mixed returns different vectors .* when its padding"):
            build()


def test_backbone_takes_flax_layers_and_refuses_plain_arrays(mixed):
    """Flax's layers have axes without names; plain arrays would be neither trained nor saved."""
    partitioner = MeshConfig(data=2, fsdp=2).build()

    def initialized(beside):
        config = DualEncoderConfig(backbone=mixed.MixedConfig(masked=True, beside=beside))
        return config, stored.initialize(config, seed=0, partitioner=partitioner)

    for beside, what in (("array", "a plain array"), ("state", "BatchStat")):
        with pytest.raises(UserError, match=rf"^mixed\.Mixed holds 'scale' .{what}., which is neither"):
            initialized(beside)
    with pytest.raises(UserError, match=r"^mixed\.Mixed must return a vector for each token, .*8, 8\], not"):
        initialized("pooled")
    config, model = initialized("linear")
    params = stored.params_of(model)
    read = stored.StoredModel(config=config, params=params, tokenizer=None, settings=None)
    again = stored.build(read, partitioner).encoder.linear.kernel[...]
    assert again.any() and np.array_equal(again, model.encoder.linear.kernel[...])


def test_setting_that_a_table_would_lose_is_refused(mixed, monkeypatch):
    entries = {"vocab_size": "vocab_size", "embed_dim": "hidden_size", "num_layers": "num_hidden_layers"}
    given = {"entries": entries, "implied": {"masked": True}, "weights": lambda config: {"token": "token"}}
    codec = HuggingFace(model_type="mixed", architecture="MixedModel", **given)
    monkeypatch.setattr(mixed.MixedConfig, "hugging_face", (codec,))
    config = backbones.register(mixed.MixedConfig)(masked=True, dtype="bfloat16")
    assert hf_config.parse(hf_config.describe(config, 0), Path("config.json"))[0].window == 4
    with pytest.raises(UserError, match=r"would lose .* window 5: it would be read as 4"):
        hf_config.describe(dataclasses.replace(config, window=5), 0)


def test_unregistered_backbone_is_refused_before_training(mixed):
    config = DualEncoderConfig(backbone=mixed.MixedConfig(masked=True))
    source = FromScratch(config=config, tokenizer="none", query_max_length=8, passage_max_length=8)
    with pytest.raises(UserError, match=r"^MixedConfig is not registered, .* put @register"):
        source.outline()


def test_module_without_a_table_entry_is_refused():
    """`jaxir.convert --to=hf` of a trained model reports the module that the table lacks."""
    params = {"layers.0.up.kernel": np.ones((2, 3), np.float32)}
    shapes = {name: x.shape for name, x in params.items()}
    assert set(hf.tensors_of_part({"layers.*.up": "block.*.fc"}, shapes, params)) == {"block.0.fc.weight"}
    with pytest.raises(UserError, match=r"table lacks its module 'layers\.\*\.up': add it to `weights`"):
        hf.tensors_of_part({"layers.*.down": "block.*.fc"}, shapes, params)


def test_name_of_a_backbone_is_unique():
    known = dict(backbones._KINDS)

    class Other(backbones.BackboneConfig):
        kind = "bert"

    with pytest.raises(ValueError, match=r"'bert' is already registered by jaxir\.models\.bert\.BertConfig"):
        backbones.register(Other)
    Other.kind, Other.hugging_face = "other", BertConfig.hugging_face
    with pytest.raises(ValueError, match="'bert' is already registered by jaxir"):
        backbones.register(Other)
    assert known == backbones._KINDS
