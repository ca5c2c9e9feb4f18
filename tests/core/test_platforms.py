"""A platform in JAX_PLATFORMS that this machine lacks is reported in one sentence, also in Python."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# JAX looks for devices again until it finds some, so one process tries all platforms.
PROGRAM = """
import json, sys
import jax, numpy as np
from jaxir import ExactIndex
from jaxir.core.errors import UserError
from jaxir.core.error_report import explain

sentences = {}
for platform in sys.argv[1:]:
    jax.config.update("jax_platforms", platform)
    try:
        jax.numpy.ones(3)
    except Exception as error:
        sentences[platform] = explain(error)
    try:
        ExactIndex.build(np.ones((2, 4), np.float32), ids=["a", "b"]).search(np.ones((1, 4), np.float32), k=1)
    except UserError as error:
        assert str(error) == sentences[platform][0], error
print(json.dumps(sentences))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="JAX has TPUs here")
def test_missing_device_is_reported_with_the_extra_that_installs_it():
    platforms = ["cuda", "gpu", "tpu", "rocm", "nonsense"]
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", PROGRAM, *platforms]
    sentences = json.loads(
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    )
    assert [status for _, status in sentences.values()] == [1] * len(platforms)
    nvidia = ("cuda", "NVIDIA GPU")
    for platform, (extra, device) in {"cuda": nvidia, "gpu": nvidia, "tpu": ("tpu", "TPU")}.items():
        sentence = sentences[platform][0]
        assert sentence.startswith(f"JAX_PLATFORMS={platform} requests a device ({device})")
        assert f"[{extra}]" in sentence and "unset JAX_PLATFORMS" in sentence
    assert "requests a device that is missing" in sentences["rocm"][0]
    assert "'nonsense' is not one of cpu, cuda and tpu" in sentences["nonsense"][0]
