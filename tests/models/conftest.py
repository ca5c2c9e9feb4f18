"""What is compared here does not hang on XLA's optimizations, and compiling without them takes half the time."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def few_optimizations():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
