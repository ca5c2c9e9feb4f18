"""A small model for the small folder of tests/conftest.py."""

from pathlib import Path

import pytest

MODEL = f"hf:{Path(__file__).resolve().parent.parent / 'golden' / 'bert'}"


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture
def tiny_gin(tmp_path, model) -> Path:
    """A gin file of a model that trains in seconds."""
    lines = [
        'include "gin/experiments/minilm.gin"',
        f'MODEL = "{model}"',
        "QUERY_LENGTH = 8",
        "PASSAGE_LENGTH = 8",
    ]
    path = tmp_path / "tiny.gin"
    path.write_text("\n".join(lines) + "\n")
    return path
