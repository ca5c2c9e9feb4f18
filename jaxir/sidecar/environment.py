"""Installs the sidecar's own environment: Pyserini's jar (Lucene), a Java runtime and an isolated Python."""

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
    """Returns the environment's directory, whose name depends on requirements.txt and Python's version."""
    facts = [
        REQUIREMENTS.read_text(encoding="utf-8"),
        *sys.version_info[:2],
        platform.machine(),
        sys.platform,
    ]
    return cache_directory() / f"sidecar-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def installed() -> Path | None:
    """Returns the Python of the sidecar's environment, or None if it is not installed."""
    python = directory() / "bin" / "python"
    return python if os.access(python, os.X_OK) else None


def require() -> Path:
    """Returns the Python of the sidecar's environment; if it is missing, prints a line and installs it."""
    python = installed()
    if python is None:
        print(f"the Pyserini sidecar (for BM25) is not installed; running `{INSTALL}`", file=sys.stderr)
        python = install()
    return python


@functools.cache
def shared() -> Sidecar:
    """Returns the sidecar that all Lucene indexes of this process share."""
    return Sidecar(require)


def install() -> Path:
    """Installs the sidecar's environment if it is missing, and returns its Python.

    pip checks the hash of each file and uses the user's own configuration. The directory gets its final name
    only after Java has started in the new environment. Concurrent installations wait for each other.
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
        print(
            f"installing {', '.join(names)} into {target} (200 MB to download, 300 MB on disk)",
            file=sys.stderr,
        )
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
