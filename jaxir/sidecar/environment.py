"""The sidecar's own environment: Pyserini's jar, a Java runtime and a Python that sees nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.core.installation import cache_directory
from jaxir.sidecar.client import Sidecar
from jaxir.sidecar.lucene_settings import INSTALL
from jaxir.storage.files import atomic_directory

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def directory() -> Path:
    """Returns where the environment of these requirements and this Python is, or will be."""
    facts = [
        REQUIREMENTS.read_text(encoding="utf-8"),
        *sys.version_info[:2],
        platform.machine(),
        sys.platform,
    ]
    return cache_directory() / f"sidecar-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def installed() -> Path | None:
    """Returns the environment's Python; None where there is no whole environment."""
    python = directory() / "bin" / "python"
    return python if os.access(python, os.X_OK) else None


def require() -> Path:
    """Returns the environment's Python; makes the environment, and says so, where there is none.

    Raises:
      UserError: it cannot be made.
    """
    python = installed()
    if python is None:
        print(f"the Pyserini sidecar has no environment yet; `{INSTALL}` begins", file=sys.stderr)
        python = install()
    return python


@functools.cache
def shared() -> Sidecar:
    """Returns the one sidecar of this process, which all its indexes use."""
    return Sidecar(require)


def install() -> Path:
    """Makes the environment, unless it is there; it appears only when whole and seen to work.

    pip does it, with the user's own configuration of pip, and takes only files of known hashes.
    Processes that install at once wait for each other.

    Returns:
      The environment's Python.

    Raises:
      UserError: there is no pip, a package cannot be had or Java does not start from it.
    """
    if sys.platform == "win32":
        raise UserError("the Pyserini sidecar needs Linux or macOS (on Windows: WSL)")
    target = directory()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if (python := installed()) is not None:
            return python
        started = time.monotonic()
        names = re.findall(r"^\w[^\s\\]*", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)
        print(f"installing {', '.join(names)} into {target} (200 MB to fetch, 300 MB kept)", file=sys.stderr)
        with atomic_directory(target, overwrite=True) as temporary:
            python = temporary / "bin" / "python"
            venv = [sys.executable, "-m", "venv", "--clear", str(temporary)]
            pip = [str(python), "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar", "off"]
            _run(venv, "make a virtual environment")
            _run(
                [*pip, "--disable-pip-version-check", "--requirement", str(REQUIREMENTS)],
                "install the sidecar's packages",
            )
            with Sidecar(python) as sidecar:
                versions = sidecar.versions()
        print(
            f"installed in {time.monotonic() - started:.0f} s: Java {versions['java']},"
            f" Anserini {versions['anserini']}",
            file=sys.stderr,
        )
        return target / "bin" / "python"


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-3:]
    raise UserError(
        f"could not {what}: {' '.join(errors) or f'exit status {done.returncode}'}"
        f" (the command was: {' '.join(command)})"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is installing the sidecar: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
