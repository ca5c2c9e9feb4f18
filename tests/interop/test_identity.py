"""Fingerprints of folders: computed once, and again after a file changes."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxir.interop import model_dir
from jaxir.interop.model import identity

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(GOLDEN / "bert", tmp_path / "bert"))


def fingerprint(folder: Path, **changes) -> str:
    return model_dir.load(f"hf:{folder}", **changes).fingerprint


def test_second_start_does_not_hash_the_weights(folder, monkeypatch):
    before = fingerprint(folder)

    def hashed(stored):
        raise AssertionError("the weights were read again")

    monkeypatch.setattr(identity, "fingerprint", hashed)
    assert fingerprint(folder) == before


def test_changed_weights_have_another_fingerprint(folder):
    before = fingerprint(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    save_file(tensors | {name: np.nextafter(tensors[name], np.float32(9))}, path, {"format": "pt"})
    assert fingerprint(folder) != before


def test_changed_model_does_not_take_the_fingerprint_of_its_folder(folder):
    before = fingerprint(folder)
    assert fingerprint(folder, pooling="cls") != before
    assert (
        len({before, fingerprint(folder, projection=4, seed=0), fingerprint(folder, projection=4, seed=1)})
        == 3
    )
    assert fingerprint(folder) == before
