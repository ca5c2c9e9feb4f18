"""The cache of compiled programs, and compiler options."""

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.runtime.compile_cache import GPU_OPTIONS, SPARSE_CORE_OPTIONS, compile_step, compiler_options
from jaxir.runtime.partitioning import MeshConfig

CODE = """
from jaxir.runtime.compile_cache import keep_compiled_programs
keep_compiled_programs()
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
print(jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((64, 64))))
"""


def run(**environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    env = inherited | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cache" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[Path, str]:
    """A cache that one process has filled, and that process's output."""
    home = tmp_path_factory.mktemp("home")
    return home, run(XDG_CACHE_HOME=str(home))


def test_programs_are_cached_and_reused(filled):
    home, first = filled
    (kept,) = (home / "jaxir").iterdir()
    assert kept.name.startswith("programs-")
    names = {p.name for p in kept.iterdir() if p.name.endswith("-cache")}
    assert names
    assert run(XDG_CACHE_HOME=str(home)) == first
    assert {p.name for p in kept.iterdir() if p.name.endswith("-cache")} == names


def test_users_cache_setting_is_kept(tmp_path):
    run(XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR="")
    assert not list(tmp_path.iterdir())


def test_broken_cache_fails_no_command(tmp_path, filled):
    (tmp_path / "jaxir").write_text("a file where the directory should be")
    assert float(run(XDG_CACHE_HOME=str(tmp_path))) > 0
    home, output = filled
    for entry in (home / "jaxir").glob("*/*-cache"):
        entry.write_bytes(entry.read_bytes()[:50])
    assert run(XDG_CACHE_HOME=str(home)) == output


def test_half_written_programs_are_removed(filled):
    home, _ = filled
    (kept,) = (home / "jaxir").iterdir()
    programs = set(kept.glob("*-cache"))
    assert programs
    for path in kept.iterdir():
        path.unlink()
    half = kept / "jit_other-1-cache"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    run(XDG_CACHE_HOME=str(home))
    assert set(kept.glob("*-cache")) == programs
    half.write_bytes(b"half")  # recent, so another process may still write it
    run(XDG_CACHE_HOME=str(home))
    assert half.exists()
    half.unlink()


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes that select compiler options."""

    platform: str
    device_kind: str


def mesh_of(device, *, sparse_cores=False, count=2):
    devices = np.empty(count, object)
    devices[:] = [device] * count
    mesh = types.SimpleNamespace(devices=devices)
    return types.SimpleNamespace(mesh=mesh, sparse_cores=sparse_cores)


def test_compiler_options_follow_platform_and_mesh():
    gpu = Device("gpu", "NVIDIA H100 80GB HBM3")
    assert compiler_options(mesh_of(gpu)) == compiler_options(mesh_of(gpu, sparse_cores=True)) == GPU_OPTIONS
    for kind, has in (("TPU v5p", True), ("TPU v5", True), ("TPU v6 lite", True), ("TPU v5 lite", False)):
        assert compiler_options(mesh_of(Device("tpu", kind))) == {}
        options = compiler_options(mesh_of(Device("tpu", kind), sparse_cores=True))
        assert options == (SPARSE_CORE_OPTIONS if has else {})
        assert compiler_options(mesh_of(Device("tpu", kind), sparse_cores=True, count=1)) == {}
    assert compiler_options(MeshConfig(sparse_cores=True).build()) == {}


def test_unknown_compiler_options_are_dropped(monkeypatch, capsys):
    lowered = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((2, 2)))
    given = []

    class Lowered:
        def compile(self, **how):
            given.append(how)
            return lowered.compile(**how)

    gpu = mesh_of(Device("gpu", "NVIDIA H100 80GB HBM3"))
    compile_step(Lowered(), mesh_of(Device("cpu", "cpu")))
    assert compile_step(Lowered(), gpu)(jnp.ones((2, 2))).shape == (2, 2)
    assert given == [{}, {"compiler_options": GPU_OPTIONS}] and not capsys.readouterr().err
    monkeypatch.setitem(GPU_OPTIONS, "xla_gpu_no_such_option", 1)
    assert compile_step(Lowered(), gpu)(jnp.ones((2, 2))).shape == (2, 2)
    assert given[2:] == [{"compiler_options": GPU_OPTIONS}, {}]
    assert "xla_gpu_no_such_option" in capsys.readouterr().err
