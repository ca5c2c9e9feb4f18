"""Makes `loss_cases` importable, which the tests of losses share."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def few_optimizations():
    """Compiling is quicker without most of XLA's optimizations, on which equal numbers do not hang."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
