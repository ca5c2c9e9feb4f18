"""What is compared here does not hang on XLA's optimizations; without them compiling is twice as quick.

Scoped to modules: pytest leaves a package's fixtures in force until the session ends where packages have no
`__init__.py`, and the tests that come after would compile other programs than jaxir does.
"""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def few_optimizations():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
