"""What is compared here does not hang on XLA's optimizations; without them compiling is twice as quick."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def few_optimizations():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
