"""Plans read what XLA writes down while it compiles, and a program of the run's cache is not compiled."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxir.runtime.compile_cache import keep_no_more_programs


@pytest.fixture(scope="module", autouse=True)
def compiled_anew():
    """Scoped to modules: a package's fixtures would stay in force until the session ends."""
    keep_no_more_programs()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
