"""A small model, and flags of experiments on the small BEIR folder of tests/conftest.py."""

from pathlib import Path

import gin
import pytest

MODEL = f"hf:{Path(__file__).resolve().parent.parent / 'golden' / 'bert'}"


@pytest.fixture(autouse=True)
def forget_gin():
    yield
    gin.clear_config()


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture
def tiny_gin(tmp_path, model) -> Path:
    lengths = "QUERY_LENGTH = 8\nPASSAGE_LENGTH = 8\n"
    path = tmp_path / "tiny.gin"
    path.write_text(f'include "gin/experiments/minilm.gin"\nMODEL = "{model}"\n{lengths}')
    return path


@pytest.fixture
def grid_flags(tmp_path, folder, tiny_gin) -> list[str]:
    inputs = ["--recipe=gin/runs/few_steps.gin", f"--datasets=toy={folder}", f"--models={tiny_gin}"]
    flags = ["--steps=24", "--metrics=P@1 RR", "--bindings=BATCH_SIZE=8,DEV_DISTRACTORS=4"]
    return [*inputs, *flags, f"--output_dir={tmp_path / 'out'}"]


@pytest.fixture
def rounds_flags(tmp_path, folder, tiny_gin) -> list[str]:
    recipe = f"{tiny_gin},gin/objectives/in_batch_softmax.gin,gin/runs/few_steps.gin"
    flags = ["--steps=12", "--negatives=3", "--mine=last=20", "--backend=exact", "--metrics=P@1 RR"]
    flags += ["--bindings=BATCH_SIZE=8,DEV_DISTRACTORS=4,NEGATIVES=2", f"--output_dir={tmp_path / 'out'}"]
    return [f"--recipe={recipe}", f"--dataset=beir:{folder}", *flags]


@pytest.fixture
def no_rehearsal(monkeypatch):
    """Skips the rehearsal of training runs, which starts another process."""
    monkeypatch.setattr("jaxir.experiments.rehearsal.rehearse", lambda *_: None)
