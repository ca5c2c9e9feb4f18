"""A real tokenizer, and files of records."""

import json
from pathlib import Path

import pytest

from jaxir.data.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def minilm(minilm_folder) -> Tokenizer:
    return Tokenizer.load(minilm_folder)


@pytest.fixture
def write_jsonl(tmp_path):
    def write(name: str, records: list) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in records)
        return path

    return write
