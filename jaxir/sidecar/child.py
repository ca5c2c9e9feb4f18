"""Starts and ends the process of the sidecar, which runs Lucene."""

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
# Environment variables that are not passed to the sidecar, because it has its own Java. JAVA_TOOL_OPTIONS is
# passed, so that the user can set Java's memory.
FOREIGN = ("JAVA_HOME", "JVM_PATH", "CLASSPATH", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "LD_PRELOAD")


class Process(NamedTuple):
    popen: subprocess.Popen
    directory: Path  # temporary directory with the socket and the log
    closing: contextlib.ExitStack  # its close() removes the temporary directory


def start(python: Path) -> Process:
    """Starts the sidecar with the given Python; returns when its socket listens."""
    with contextlib.ExitStack() as closing:
        directory = closing.enter_context(temporary_directory())
        if len(os.fsencode(directory / "socket")) > 100:  # macOS limits socket paths to 104 bytes
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
                start_new_session=True,  # so that Ctrl-C in a terminal does not end the sidecar
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
    """Ends a sidecar; returns the last error of its log and its exit status, as text."""
    with contextlib.suppress(BrokenPipeError):  # the sidecar has ended before it read its input
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
    """Returns a log's last line with an error and the two lines after it; without an error, its last line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kept = [line.strip() for line in lines if line.strip() and not line.startswith(("\tat ", "Picked up"))]
    errors = [at for at, line in enumerate(kept) if "rror" in line or "xception" in line]
    return " ".join(kept[errors[-1] :][:3] if errors else kept[-1:])[:300]


def repair_hint(python: Path) -> str:
    """Returns the part of an error message that says how to repair the sidecar's environment."""
    return f"remove {python.parents[1]} and run `{INSTALL}` again"
