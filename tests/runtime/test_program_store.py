"""Stored programs: a later process loads them without tracing, and never those of another model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
CODE = """
import json, sys
import jax
from jaxir import DualEncoder
from jaxir.retrieval.encoding import batch_runner, tower_functions
from jaxir.retrieval.encoding.batch_runner import CompiledShapes

calls = []
def counted(model, ids):
    calls.append(ids.shape)  # while it is traced
    return model.encode(ids, tower="passage")

from jaxir.retrieval.encoding.batch_runner import Runner
from jaxir.runtime.partitioning import MeshConfig

encoder = DualEncoder.load(sys.argv[1])
runner = Runner(encoder.model, MeshConfig().build([jax.devices()[int(sys.argv[3])]]))
if sys.argv[2] == "counted":
    counted.__module__ = counted.__qualname__ = "counted"
    function = counted
else:
    function = tower_functions.EMBED["passage"]
import numpy as np
ids = np.array([[5, 6, 7, 8, 9, 0, 0, 0]], np.int32)
print(json.dumps([runner.call(function, ids).tolist(), len(calls)]))
"""


def encoded(
    home: Path, folder: Path, which: str = "counted", device: int = 0, **environment: str
) -> tuple[list, int]:
    """Returns a new process's vectors, from one of its two devices, and how often it traced the function."""
    flags = os.environ["JAXIR_QUICK_XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    env = os.environ | {"XDG_CACHE_HOME": str(home), "XLA_FLAGS": flags} | environment
    if "JAX_COMPILATION_CACHE_DIR" not in environment:
        del env["JAX_COMPILATION_CACHE_DIR"]
    command = [sys.executable, "-c", CODE, f"hf:{folder}", which, str(device)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    vectors, traces = json.loads(done.stdout.splitlines()[-1])
    return vectors, traces


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A home whose store has one program, and the vectors of that program."""
    home = tmp_path_factory.mktemp("home")
    vectors, traces = encoded(home, GOLDEN / "bert")
    assert traces == 1
    return home, vectors


def programs(home: Path) -> list[Path]:
    return sorted(home.glob("jaxir/programs-*-loadable/*"))


def test_later_process_runs_a_stored_program_without_tracing(filled):
    home, vectors = filled
    assert encoded(home, GOLDEN / "bert") == (vectors, 0)
    assert len(programs(home)) == 1


@pytest.mark.slow
def test_each_device_has_its_own_program(filled):
    home, vectors = filled
    assert encoded(home, GOLDEN / "bert", device=1) == (vectors, 1)
    assert encoded(home, GOLDEN / "bert", device=1) == (vectors, 0)
    for path in programs(home)[1:]:
        path.unlink()


@pytest.mark.slow
def test_other_settings_of_the_same_shape_have_another_program(filled, tmp_path):
    home, vectors = filled
    folder = tmp_path / "other"
    shutil.copytree(GOLDEN / "bert", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 0.5}))
    found, traces = encoded(home, folder)
    assert traces == 1 and found != vectors
    for path in programs(home)[1:]:
        path.unlink()


@pytest.mark.slow
def test_damaged_program_is_compiled_again(filled):
    home, vectors = filled
    for path in programs(home):
        path.write_bytes(b"damaged")
    assert encoded(home, GOLDEN / "bert") == (vectors, 1)
    assert encoded(home, GOLDEN / "bert") == (vectors, 0)


@pytest.mark.slow
def test_nothing_is_stored_without_a_cache(filled, tmp_path):
    assert encoded(tmp_path, GOLDEN / "bert", JAX_COMPILATION_CACHE_DIR="") == (filled[1], 1)
    assert not programs(tmp_path)


@pytest.mark.slow
def test_program_that_jax_found_in_its_cache_is_not_stored(filled, tmp_path):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    stored = tmp_path / "programs-loadable"
    assert encoded(tmp_path, GOLDEN / "bert", **cache) == (filled[1], 1)
    shutil.rmtree(stored)
    for _ in range(2):  # JAX would store a program that the next process loads, but cannot run
        assert encoded(tmp_path, GOLDEN / "bert", **cache) == (filled[1], 1)
    assert not stored.exists()


SEARCH = """
import sys
import numpy as np
from jaxir.retrieval.indexes import topk
from jaxir.retrieval.indexes.exact import ExactIndex

traces = []
trace = topk._products
topk._products = lambda *arrays, **how: (traces.append(1), trace(*arrays, **how))[1]
index = ExactIndex.build(np.eye(200, 16, dtype=np.float32) + 0.1, [str(n) for n in range(200)])
print(index.search(np.eye(1, 16, dtype=np.float32), 3)[1], len(traces))
"""


def test_later_process_searches_without_tracing(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": os.environ["JAXIR_QUICK_XLA_FLAGS"]}
    del env["JAX_COMPILATION_CACHE_DIR"]
    runs = [
        subprocess.run([sys.executable, "-c", SEARCH], env=env, capture_output=True, text=True, timeout=300)
        for _ in range(2)
    ]
    answers, traces = zip(*(run.stdout.rsplit(" ", 1) for run in runs), strict=True)
    assert answers[0] == answers[1] and "'0'" in answers[0]
    assert [int(n) for n in traces] == [1, 0]
    assert len(programs(tmp_path)) == 2  # that of a block of vectors, and that of the merge
