"""Weights that are only used in bfloat16 are kept so, and loading needs little more than their bytes."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import DualEncoder
from jaxir.core.errors import UserError
from jaxir.interop import model_dir

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
TEXTS = ["the cat sat on the mat", "a dog"]


@pytest.mark.parametrize("name", ["bert", "modernbert", "t5_1_1"])
def test_halved_weights_give_the_same_vectors(name):
    whole, halved = (
        model_dir.load(f"st:{GOLDEN / name}", dtype="bfloat16", halved=halved) for halved in (False, True)
    )
    ids = jnp.array([[4, 5, 6, 7], [8, 9, 0, 0]])
    one, other = (found.model.encode(ids, tower="query") for found in (whole, halved))
    np.testing.assert_array_equal(one, other)
    assert whole.fingerprint == halved.fingerprint


def test_rounded_weights_are_not_saved(tmp_path):
    encoder = DualEncoder.load(f"st:{GOLDEN / 'bert'}", dtype="bfloat16")
    with pytest.raises(UserError, match="rounded to bfloat16: load the model in float32 to save it"):
        encoder.save(tmp_path / "model")


MEASURE = """
import sys, threading
from jaxir import DualEncoder

def memory():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

how = {sys.argv[3]: sys.argv[4]}
DualEncoder.load(sys.argv[2], **how)  # compiles, and imports what is needed
before, peak, done = memory(), [0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], memory())

watcher = threading.Thread(target=watch)
watcher.start()
DualEncoder.load(sys.argv[1], **how)
done.set()
watcher.join()
print(peak[0] - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [("dtype", "bfloat16"), ("weights", "int8"), ("weights", "nf4")])
def test_loading_needs_little_more_than_the_stored_bytes(how, tmp_path):
    """A Qwen3 of 1.0 GB in bfloat16: at most 1.15 times its bytes are in memory at any time."""
    import ml_dtypes
    import safetensors.numpy

    from jaxir.interop.huggingface import hf, hf_config
    from jaxir.models.llama import LlamaConfig

    config = LlamaConfig(vocab_size=100_000, embed_dim=2048, mlp_dim=6144, num_layers=6)
    zero = np.zeros((), ml_dtypes.bfloat16)
    shapes = hf.stored.encoder_shapes(config)
    names = hf.tensors_of(config, {n: np.broadcast_to(zero, s) for n, s in shapes.items()}, pad_id=0)
    draw = np.random.default_rng(0)
    tensors = {n: draw.integers(0, 100, x.shape, np.int16).view(ml_dtypes.bfloat16) for n, x in names.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    hf.write_json(tmp_path / "config.json", hf_config.describe(config, 0))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((GOLDEN / "bert" / file).read_bytes())
    stored = sum(x.nbytes for x in tensors.values())
    del tensors
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, f"hf:{tmp_path}", f"hf:{GOLDEN / 'bert'}", *how],
        # Without the tests' settings of malloc and XLA, which change what is in memory.
        env={name: os.environ[name] for name in ("PATH", "HOME")} | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert stored > 800e6 and int(done.stdout) < 1.15 * stored, (int(done.stdout), stored)
