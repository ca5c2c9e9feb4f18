"""A small model, and flags of experiments on the small folder of tests/conftest.py."""

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


@pytest.fixture
def grid_flags(tmp_path, folder, tiny_gin) -> list[str]:
    return [
        "--recipe=gin/runs/few_steps.gin",
        f"--datasets=toy={folder}",
        f"--models={tiny_gin}",
        "--steps=24",
        "--metrics=P@1 RR",
        f"--output_dir={tmp_path / 'out'}",
        "--bindings=BATCH_SIZE=8,DEV_DISTRACTORS=4",
    ]


@pytest.fixture
def rounds_flags(tmp_path, folder, tiny_gin) -> list[str]:
    recipe = f"{tiny_gin},gin/objectives/in_batch_softmax.gin,gin/runs/few_steps.gin"
    return [
        f"--recipe={recipe}",
        f"--dataset=beir:{folder}",
        f"--output_dir={tmp_path / 'out'}",
        "--steps=12",
        "--negatives=3",
        "--mine=last=20",
        "--backend=exact",
        "--metrics=P@1 RR",
        "--bindings=BATCH_SIZE=8,DEV_DISTRACTORS=4,NEGATIVES=2",
    ]


@pytest.fixture
def no_rehearsal(monkeypatch):
    """Skips the check of training runs, which takes a process of its own."""
    monkeypatch.setattr("jaxir.experiments.rehearsal.rehearse", lambda *_: None)
