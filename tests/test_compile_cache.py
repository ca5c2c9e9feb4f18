"""Compiled programs are kept between processes, by kind of processor, and never in the way."""

import os
import subprocess
import sys

import pytest

CODE = """
from jaxir.compile_cache import keep_compiled_programs
keep_compiled_programs()
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
print(jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((64, 64))))
"""


def run(**environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "cache" not in done.stderr
    return done.stdout


def test_programs_are_kept_and_used_again(tmp_path):
    first = run(XDG_CACHE_HOME=str(tmp_path))
    (kept,) = (tmp_path / "jaxir").iterdir()
    assert kept.name.startswith("programs-")
    names = {p.name for p in kept.iterdir() if p.name.endswith("-cache")}
    assert names
    assert run(XDG_CACHE_HOME=str(tmp_path)) == first
    assert {p.name for p in kept.iterdir() if p.name.endswith("-cache")} == names


def test_a_users_own_setting_wins(tmp_path):
    run(XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR="")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["unwritable", pytest.param("truncated", marks=pytest.mark.slow)])
def test_a_broken_cache_costs_nothing_but_time(tmp_path, damage):
    if damage == "unwritable":
        (tmp_path / "jaxir").write_text("a file where the directory should be")
    else:
        run(XDG_CACHE_HOME=str(tmp_path))
        for entry in (tmp_path / "jaxir").glob("*/*-cache"):
            entry.write_bytes(entry.read_bytes()[:50])
    assert float(run(XDG_CACHE_HOME=str(tmp_path))) > 0


def test_a_program_that_was_half_written_when_its_process_was_killed_is_in_nobodys_way(tmp_path):
    run(XDG_CACHE_HOME=str(tmp_path))
    (kept,) = (tmp_path / "jaxir").iterdir()
    programs = set(kept.glob("*-cache"))
    assert programs
    for path in kept.iterdir():
        path.unlink()
    half = kept / "jit_other-1-cache"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    run(XDG_CACHE_HOME=str(tmp_path))
    assert set(kept.glob("*-cache")) == programs
    half.write_bytes(b"half")  # just now: it may be on its way
    run(XDG_CACHE_HOME=str(tmp_path))
    assert half.exists()
