"""Lines of JSON over a socket: one connection for each request.

The client sends a line with the request; for "index", then a line for each batch of documents and a last one.
The server answers with lines that hold one of "progress", "result" and "error"; after the last two it closes.
Lines are ASCII, so that no codec of Java or Python can spoil a text.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import IO, Any


class Closed(Exception):
    """The other end is gone, or sent what is no message."""


class Channel:
    """Messages over a connected socket."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._file: IO[bytes] = connection.makefile("rb", buffering=1 << 16)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message.

        Raises:
          Closed: nobody receives it.
        """
        self.send_line(json.dumps(message).encode("ascii"))

    def send_line(self, line: bytes) -> None:
        """Sends a message that is JSON already, on one line."""
        try:
            self._connection.sendall(line + b"\n")
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self) -> dict[str, Any]:
        """Returns the next message.

        Raises:
          Closed: there is none.
        """
        try:
            return json.loads(self._file.readline())
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from None

    def abandon(self, seconds: float) -> None:
        """Says that nothing more comes, and waits, no longer than this, until the other end has let go."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(seconds)
            while self._file.read(1 << 16):
                pass

    def close(self) -> None:
        """Closes the connection."""
        self._file.close()
        self._connection.close()


def identity_of(index: str | Path) -> list[int] | None:
    """Returns what tells an index's directory from another one in its place; None if there is none."""
    try:
        found = Path(index).stat()
    except OSError:
        return None
    return [found.st_ino, found.st_mtime_ns]
