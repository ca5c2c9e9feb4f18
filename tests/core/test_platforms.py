"""A platform that JAX_PLATFORMS names and the machine lacks costs one sentence, also in Python."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# JAX looks for devices again as long as it has found none, so one process tries all platforms.
PROGRAM = """
import json, sys
import jax, numpy as np
from jaxir import ExactIndex
from jaxir.core.errors import UserError
from jaxir.core.error_report import explain

told = {}
for platform in sys.argv[1:]:
    jax.config.update("jax_platforms", platform)
    try:
        jax.numpy.ones(3)
    except Exception as error:
        told[platform] = explain(error)
    try:
        ExactIndex.build(np.ones((2, 4), np.float32), ids=["a", "b"]).search(np.ones((1, 4), np.float32), k=1)
    except UserError as error:
        assert str(error) == told[platform][0], error
print(json.dumps(told))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="JAX has TPUs here")
def test_a_platform_without_its_device_is_named_with_the_extra_that_installs_it():
    platforms = ["cuda", "gpu", "tpu", "rocm", "nonsense"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *platforms],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    assert [status for _, status in told.values()] == [1] * len(platforms)
    for platform, extra, device in (
        ("cuda", "cuda", "NVIDIA GPU"),
        ("gpu", "cuda", "NVIDIA GPU"),
        ("tpu", "tpu", "TPU"),
    ):
        sentence = told[platform][0]
        assert sentence.startswith(f"JAX_PLATFORMS={platform} requests a device ({device})")
        assert f"[{extra}]" in sentence and "unset JAX_PLATFORMS" in sentence
    assert "requests a device that is missing" in told["rocm"][0]
    assert "'nonsense' is not one of cpu, cuda and tpu" in told["nonsense"][0]
