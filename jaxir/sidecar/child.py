"""The sidecar's process from outside: how it is started, ended, and what it said last."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError
from jaxir.sidecar.lucene_settings import INSTALL
from jaxir.storage.temporary_outputs import temporary_directory

SERVER = "import sys; sys.path.append(sys.argv[1]); from server.process import main; main()"
# Which Java is used is the environment's business; JAVA_TOOL_OPTIONS (memory) is the user's.
FOREIGN = ("JAVA_HOME", "JVM_PATH", "CLASSPATH", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "LD_PRELOAD")


class Process(NamedTuple):
    """A sidecar process, the directory of its socket and log, and what removes the directory."""

    popen: subprocess.Popen
    directory: Path
    closing: contextlib.ExitStack


def start(python: Path) -> Process:
    """Starts the server on a Python and returns when its socket listens.

    Raises:
      UserError: it does not start.
    """
    with contextlib.ExitStack() as closing:
        directory = closing.enter_context(temporary_directory())
        if len(os.fsencode(directory / "socket")) > 100:  # a socket's path may not be longer (104 on macOS)
            closing.close()
            directory = closing.enter_context(temporary_directory(Path("/tmp")))
        variables = {k: v for k, v in os.environ.items() if k not in FOREIGN and not k.startswith("ANSERINI")}
        with (directory / "log").open("wb") as log:
            popen = subprocess.Popen(
                [str(python), "-I", "-c", SERVER, str(Path(__file__).parent)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                env=variables,
                start_new_session=True,  # Ctrl-C at a terminal is meant for its user
            )
        process = Process(popen, directory, closing.pop_all())
    hello = {"directory": str(directory), "parent": os.getpid()}
    try:
        popen.stdin.write(json.dumps(hello).encode() + b"\n")
        popen.stdin.flush()
        ready = popen.stdout.readline()
    except OSError:
        ready = b""
    except BaseException:
        end(process)
        raise
    if not ready:
        raise UserError(f"the Pyserini sidecar does not start ({end(process)}); {how_to_mend(python)}")
    return process


def end(process: Process) -> str:
    """Ends a process and returns its last words and status."""
    with contextlib.suppress(BrokenPipeError):  # it read nothing of what was written
        process.popen.stdin.close()
    try:
        status = process.popen.wait(5)
    except subprocess.TimeoutExpired:
        process.popen.kill()
        status = process.popen.wait()
    process.popen.stdout.close()
    words = _last_words(process.directory / "log")
    process.closing.close()
    return f"{words}; status {status}" if words else f"status {status}"


def _last_words(log: Path) -> str:
    """Returns the last error in a log, and the two lines after it."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip() and not line.startswith(("\tat ", "Picked up"))]
    telling = [at for at, line in enumerate(said) if "rror" in line or "xception" in line]
    return " ".join(said[telling[-1] :][:3] if telling else said[-1:])[:300]


def how_to_mend(python: Path) -> str:
    """Returns what to do about an environment that does not work, by its Python."""
    return f"remove {python.parents[1]} and run `{INSTALL}` again"
