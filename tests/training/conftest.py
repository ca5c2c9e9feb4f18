"""Makes `tiny_run` importable; the processes of these tests share what they compile."""

import os
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that trains."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(scope="module", autouse=True)
def in_process_cache(compile_cache):
    """Lets the runs in this process share what they compile, too."""
    settings = {
        "jax_compilation_cache_dir": compile_cache["JAX_COMPILATION_CACHE_DIR"],
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield
