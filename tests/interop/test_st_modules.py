"""Folders with each module of sentence-transformers, and jaxir's own folders, give its vectors."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxir import DualEncoder
from jaxir.core.errors import UserError
from jaxir.interop import formats
from tests.interop.folders import change, module_folder

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
MODULES = GOLDEN / "st_modules"
TEXTS = json.loads((MODULES / "texts.json").read_text())
SHARING = {"router": "ade", "router_shared": "ade_spl"}
NAMES = sorted(folder.name for folder in MODULES.iterdir() if folder.is_dir())


def vectors_of(encoder: DualEncoder) -> dict[str, np.ndarray]:
    return {"query": encoder.encode_queries(TEXTS), "passage": encoder.encode_passages(TEXTS)}


@pytest.mark.parametrize("name", NAMES)
def test_vectors_equal_sentence_transformers(name, tmp_path):
    encoder = DualEncoder.load(f"st:{module_folder(name, tmp_path)}")
    config = encoder.model.config
    assert config.sharing == SHARING.get(name, "sde")
    with np.load(MODULES / name / "vectors.npz") as file:
        golden = dict(file)
    for tower, found in vectors_of(encoder).items():
        error = np.abs(found - golden[tower]).max() / max(1.0, np.abs(golden[tower]).max())
        assert error < 2e-6, (tower, error)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "model2vec"])
def test_written_folder_has_the_same_vectors(name, tmp_path, capsys):
    before = vectors_of(DualEncoder.load(f"st:{module_folder(name, tmp_path)}"))
    formats.convert(f"st:{tmp_path / name}", tmp_path / "jaxir", to="jaxir")
    formats.convert(str(tmp_path / "jaxir"), tmp_path / "written", to="st")
    first = json.loads((tmp_path / "written" / "modules.json").read_text())[0]["type"].rpartition(".")[2]
    assert first == {"static": "StaticEmbedding"}.get(name, "Router" if name in SHARING else "Transformer")
    for tower, found in vectors_of(DualEncoder.load(f"st:{tmp_path / 'written'}")).items():
        np.testing.assert_array_equal(found, before[tower])


def test_model2vec_is_not_written_as_a_folder_that_reads_unknown_words(tmp_path):
    with pytest.raises(UserError, match="leaves unknown words out of the mean"):
        formats.convert(f"st:{module_folder('model2vec', tmp_path)}", tmp_path / "out", to="st")


@pytest.mark.parametrize(
    ("name", "file", "entries", "message"),
    [
        ("mixed", "4_Dropout/config.json", {}, None),
        (
            "two_dense",
            "2_Dense/config.json",
            {"activation_function": "torch.nn.Softmax"},
            "activation torch.nn.S",
        ),
        ("two_dense", "2_Dense/config.json", {"module_input_name": "token_embeddings"}, "vectors of tokens"),
        (
            "poolings",
            "1_Pooling/config.json",
            {"pooling_mode": "median"},
            "pooling 'median' is not supported",
        ),
        ("layers", "1_WeightedLayerPooling/config.json", {"layer_start": 0}, "layer_start 0 and 2 weights"),
        ("truncated", "config_sentence_transformers.json", {"truncate_dim": -1}, "truncate_dim"),
    ],
)
def test_modules_that_are_not_supported_are_refused(name, file, entries, message, tmp_path):
    folder = module_folder(name, tmp_path)
    change(folder / file, **entries)
    if message is None:
        DualEncoder.load(f"st:{folder}")  # guard: the folder that the other cases change loads
        return
    with pytest.raises(UserError, match=message):
        DualEncoder.load(f"st:{folder}")


def test_towers_of_different_architectures_are_refused(tmp_path):
    folder = module_folder("router", tmp_path)
    change(folder / "query_1_Pooling" / "config.json", pooling_mode="max")
    with pytest.raises(UserError, match="different architectures"):
        DualEncoder.load(f"st:{folder}")


def test_comparison_lists_every_module():
    page = (GOLDEN.parent.parent / "docs" / "compare.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \| (?:yes|no) \|", page, re.M)
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(listed) == sorted(json.loads((MODULES / "modules.json").read_text()))


def test_prompt_of_any_name_goes_before_texts(tmp_path):
    folder = module_folder("without_prompt", tmp_path)
    change(folder / "config_sentence_transformers.json", prompts={"topic": "cat: ", "query": "ask the cat: "})
    named = DualEncoder.load(f"st:{folder}", prompt_name="topic")
    change(folder / "config_sentence_transformers.json", prompts={"query": "cat: ", "document": "cat: "})
    expected = vectors_of(DualEncoder.load(f"st:{folder}"))
    for tower, found in vectors_of(named).items():
        np.testing.assert_array_equal(found, expected[tower])
    with pytest.raises(UserError, match="no prompt named 'topic'; it has 'query', 'document'"):
        DualEncoder.load(f"st:{folder}", prompt_name="topic")
