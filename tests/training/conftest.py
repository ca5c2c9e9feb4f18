"""A run that many tests copy."""

from pathlib import Path

import pytest

from tests.training.saved_run import saved_steps
from tests.training.tiny_run import stop_at


@pytest.fixture(scope="session")
def stopped(tmp_path_factory) -> Path:
    """A run that SIGTERM stopped before its end, with three checkpoints."""
    run_dir = stop_at(tmp_path_factory.mktemp("stopped") / "run", 8)
    assert len(saved_steps(run_dir)) >= 3
    return run_dir
