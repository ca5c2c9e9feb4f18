"""The protocol between jaxir and the sidecar: lines of JSON over a socket, one connection per request.

The client sends a line with the request. For "index" it then sends a line for each batch of documents, and an
empty batch. The server answers with lines that have a key "progress", "result" or "error"; it closes the
connection after "result" or "error". Lines are ASCII, so that Java and Python need no common codec.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import IO, Any


class Closed(Exception):
    """The other process has closed the connection, or sent an invalid message."""


class Channel:
    """Sends and receives messages (dicts, as lines of JSON) over a connected socket."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._file: IO[bytes] = connection.makefile("rb", buffering=1 << 16)

    def send(self, message: dict[str, Any]) -> None:
        self.send_line(json.dumps(message).encode("ascii"))

    def send_line(self, line: bytes) -> None:
        """Sends one line of JSON; raises Closed if the other process has closed the connection."""
        try:
            self._connection.sendall(line + b"\n")
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self) -> dict[str, Any]:
        """Waits for the next message and returns it; raises Closed if the connection was closed."""
        try:
            return json.loads(self._file.readline())
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from None

    def abandon(self, seconds: float) -> None:
        """Ends sending; waits at most `seconds` until the other process has closed the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(seconds)
            while self._file.read(1 << 16):
                pass

    def close(self) -> None:
        self._file.close()
        self._connection.close()


def identity_of(index: str | Path) -> list[int] | None:
    """Returns a value that changes when the directory of an index is replaced; None if it is missing."""
    try:
        found = Path(index).stat()
    except OSError:
        return None
    return [found.st_ino, found.st_mtime_ns]
