"""The sidecar's main program: listens at a socket, with a thread for each request, and watches its parent.

The first line of standard input is {"directory": ..., "parent": ...}: a directory that only the user can
enter, and the parent's process id. The sidecar ends within a second after its parent ends or closes stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from . import java
from .lucene import Lucene, Refused
from .protocol import Channel, Closed

WATCH_SECONDS = 0.5  # interval of checking whether the parent process is alive


class Server:
    """Answers requests at a socket in `directory`; starts Java at the first request that needs Java."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(directory / "socket"))
        self._socket.listen(128)
        self._java_wanted, self._java_known = threading.Event(), threading.Event()
        self._versions: dict[str, str] = {}
        self._lucene: Lucene | None = None
        self._unusable = ""

    def run(self) -> None:
        """Serves forever. The main thread starts Java, because a thread that starts Java must not end."""
        threading.Thread(target=self._accept, daemon=True).start()
        self._java_wanted.wait()
        try:
            self._versions = java.start(self._directory)
            self._lucene = Lucene()
        except java.Unusable as error:
            self._unusable = str(error)
        except Exception as error:
            traceback.print_exc()
            self._unusable = f"Anserini cannot be used ({_first_line(error)})"
        self._java_known.set()
        threading.Event().wait()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # no file descriptor is free: try again, while clients wait
                time.sleep(0.1)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            request = channel.receive()
            try:
                channel.send_line(b'{"result": ' + self._answer(channel, request) + b"}")
            except java.Unusable as error:
                channel.send(_error("unusable", str(error)))
            except Refused as error:
                channel.send(_error("refused", str(error)))
        except Closed:
            pass
        except Exception as error:
            traceback.print_exc()
            with contextlib.suppress(Closed):
                channel.send(_error("failed", _first_line(error)))
        finally:
            channel.close()
            if self._lucene is not None:
                java.detach()

    def _answer(self, channel: Channel, request: dict[str, Any]) -> bytes:
        what = request.pop("do", None)
        if what == "ping":
            return b'"pong"'
        self._java_wanted.set()
        self._java_known.wait()
        if self._lucene is None:
            raise java.Unusable(self._unusable)
        if what == "versions":
            return json.dumps(self._versions).encode("ascii")
        answer = getattr(self._lucene, what)
        return answer(channel, **request) if what == "index" else answer(**request)


def watch(directory: Path, parent: int) -> None:
    """Removes `directory` and ends this process when the process `parent` has ended or closed the input."""
    while os.getppid() == parent:
        if select.select([0], [], [], WATCH_SECONDS)[0] and not os.read(0, 4096):
            break
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Runs the sidecar; prints {"ready": true} when its socket listens."""
    hello = json.loads(sys.stdin.readline())
    directory = Path(hello["directory"])
    threading.Thread(target=watch, args=(directory, hello["parent"]), daemon=True).start()
    server = Server(directory)
    print(json.dumps({"ready": True}), flush=True)
    os.dup2(2, 1)  # redirect Java's standard output to the log
    server.run()


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].removeprefix("JVM exception occurred: ")
