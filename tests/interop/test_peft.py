"""Models in folders of PEFT give PEFT's vectors (golden/make_peft.py), and survive a round trip."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxir import DualEncoder
from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.formats import convert
from jaxir.interop.model import lora, stored
from tests.interop.folders import change, exchange

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NAMES = ("bert", "qwen3", "modernbert")


def folder_of(name: str, place: Path) -> Path:
    """Copies a folder of PEFT and the model that it adapts."""
    base, folder = place / "base", place / "adapters"
    shutil.copytree(GOLDEN / name, base)
    if not (base / "tokenizer.json").exists():
        shutil.copy(GOLDEN / "bert" / "tokenizer.json", base)
    shutil.copytree(GOLDEN / "peft" / name, folder)
    change(folder / "adapter_config.json", base_model_name_or_path=str(base))
    return folder


def arrays(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_token_vectors_are_pefts(name, tmp_path):
    found, _ = model_dir.read(f"hf:{folder_of(name, tmp_path)}")
    golden = np.load(GOLDEN / "peft" / name / "golden.npz")
    ids, expected = golden["ids"], golden["output"]
    ids = exchange(ids, found.tokenizer.pad_swap or 0)
    for model in (found, lora.merged(found)):
        output = nnx.jit(lambda m, x: m.encoder(x))(stored.build(model), jnp.asarray(ids))
        error = np.abs(np.where((ids != 0)[..., None], output - expected, 0.0)).max()
        assert error < 5e-6 * max(1.0, np.abs(expected).max()), error


@pytest.mark.parametrize("name", NAMES)
def test_written_adapters_are_pefts(name, tmp_path):
    folder = folder_of(name, tmp_path)
    convert(f"hf:{folder}", tmp_path / "written", "peft")
    about = json.loads((tmp_path / "written" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(tmp_path / "base")
    before, after = arrays(folder), arrays(tmp_path / "written")
    settings = json.loads((folder / "adapter_config.json").read_text())
    for key in (k.removesuffix(".lora_A.weight") for k in before if k.endswith("lora_A.weight")):
        if ".pooler." in key:
            continue
        module, products = key.removeprefix("base_model.model."), []
        for tensors, config in ((before, settings), (after, about)):
            down, up = (tensors[f"{key}.lora_{part}.weight"] for part in "AB")
            alphas = config.get("alpha_pattern") or {}
            alpha = next((v for p, v in alphas.items() if module.endswith(p)), config["lora_alpha"])
            products.append(alpha / len(down) ** (0.5 if config.get("use_rslora") else 1) * up @ down)
        np.testing.assert_allclose(*products, atol=1e-6)
    convert(f"hf:{folder}", tmp_path / "merged", "st")
    texts = ["a dog", "the cat the dog"]
    vectors = [
        DualEncoder.load(spec).encode_passages(texts)
        for spec in (f"st:{tmp_path / 'written'}", f"st:{tmp_path / 'merged'}")
    ]
    np.testing.assert_allclose(*vectors, atol=2e-6)


def test_what_is_not_lora_is_refused(tmp_path):
    folder = folder_of("bert", tmp_path)
    for entry, value, said in (
        ("use_dora", True, "use_dora True is not supported"),
        ("peft_type", "IA3", "peft_type 'IA3' is not supported"),
        ("base_model_name_or_path", None, "write the adapted model's name"),
    ):
        before = json.loads((folder / "adapter_config.json").read_text())[entry]
        change(folder / "adapter_config.json", **{entry: value})
        with pytest.raises(UserError, match=said):
            model_dir.read(f"hf:{folder}")
        change(folder / "adapter_config.json", **{entry: before})
    tensors = arrays(folder) | {"base_model.model.embeddings.lora_embedding_A": np.zeros((3, 9), np.float32)}
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(
        UserError, match=r"lora_embedding_A is not the adapter of a dense layer of the encoder"
    ):
        model_dir.read(f"hf:{folder}")
    with pytest.raises(UserError, match="holds the adapters of a dual encoder"):
        convert(f"hf:{tmp_path / 'base'}", tmp_path / "out", "peft")
