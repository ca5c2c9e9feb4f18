"""Starting and ending the sidecar's process."""

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
# Variables not passed on: the environment has its own Java. JAVA_TOOL_OPTIONS (memory) is the user's.
FOREIGN = ("JAVA_HOME", "JVM_PATH", "CLASSPATH", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "LD_PRELOAD")


class Process(NamedTuple):
    popen: subprocess.Popen
    directory: Path  # of the socket and the log
    closing: contextlib.ExitStack  # removes the directory


def start(python: Path) -> Process:
    """Starts the server on a Python and returns when its socket listens."""
    with contextlib.ExitStack() as closing:
        directory = closing.enter_context(temporary_directory())
        if len(os.fsencode(directory / "socket")) > 100:  # the limit of a socket's path is 104 on macOS
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
                start_new_session=True,  # Ctrl-C in a terminal does not reach it
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
        raise UserError(f"the Pyserini sidecar does not start ({end(process)}); {repair_hint(python)}")
    return process


def end(process: Process) -> str:
    """Ends a process and returns its last error and status."""
    with contextlib.suppress(BrokenPipeError):  # the process read nothing
        process.popen.stdin.close()
    try:
        status = process.popen.wait(5)
    except subprocess.TimeoutExpired:
        process.popen.kill()
        status = process.popen.wait()
    process.popen.stdout.close()
    error = _last_error(process.directory / "log")
    process.closing.close()
    return f"{error}; status {status}" if error else f"status {status}"


def _last_error(log: Path) -> str:
    """Returns the last error in a log and the two lines after it, or else its last line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kept = [line.strip() for line in lines if line.strip() and not line.startswith(("\tat ", "Picked up"))]
    errors = [at for at, line in enumerate(kept) if "rror" in line or "xception" in line]
    return " ".join(kept[errors[-1] :][:3] if errors else kept[-1:])[:300]


def repair_hint(python: Path) -> str:
    """Returns how to repair the environment of this Python."""
    return f"remove {python.parents[1]} and run `{INSTALL}` again"
