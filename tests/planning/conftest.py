"""Fixtures of plans. Plans read what XLA dumps while compiling, so cached programs must not be used."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxir.core.errors import UserError
from jaxir.interop.huggingface import hf_config
from jaxir.interop.weights.weights import write_json
from jaxir.models import t5
from jaxir.planning import devices
from jaxir.runtime.compile_cache import keep_no_more_programs

SMALL = t5.T5Config(
    vocab_size=72, embed_dim=32, num_layers=2, num_heads=2, head_dim=16, mlp_dim=64, dropout_rate=0.0
)
MACROS = ("QUERY_LENGTH=8", "PASSAGE_LENGTH=16", "BATCH_SIZE=16", "PROJECTION=8", "STEPS=1000", "FSDP=2")
QUICK = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0", "JAX_OPTIMIZATION_LEVEL": "O1"}


@pytest.fixture(scope="module", autouse=True)
def compiled_anew():
    """Turns the compile cache off for a module; a package's fixture would last until the session ends."""
    jax.devices()  # a plan that uses JAX first would choose the number of devices for all tests
    keep_no_more_programs()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def tpu_compiler():
    """Skips the test where libtpu is not installed."""
    try:
        devices.find_libtpu()
    except UserError:
        pytest.skip("libtpu is not installed (make plan-tools)")


@pytest.fixture
def model(tmp_path) -> Path:
    """A Hugging Face folder without weights or tokenizer."""
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / "config.json", hf_config.describe(SMALL, 0))
    return tmp_path / "model"


@pytest.fixture
def small_macros(model) -> list[str]:
    """Flags that make gin/samtone_base.gin train `model`."""
    return [f"--gin.{macro}" for macro in (*MACROS, f"MODEL=hf:{model}")]


def users_environment(**more: str) -> dict[str, str]:
    """Returns the environment without the tests' fake devices and chosen platform."""
    return {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | more


@pytest.fixture
def in_process(tmp_path):
    """Runs `python WORDS` as users do."""

    def run(*words: str, **more: str) -> subprocess.CompletedProcess:
        how = {"env": users_environment(**more), "cwd": tmp_path, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, *words], **how, timeout=280)

    return run
