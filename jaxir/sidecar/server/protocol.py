"""Lines of JSON over a socket: one connection for each request.

The client sends a line with the token, then a line with the request; for "index", then a line for each batch
of documents and a last one. The server answers with lines that hold one of "progress", "result" and "error";
after the last two it closes. Lines are ASCII, so that no codec of Java or Python can spoil a text.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import IO, Any

MAX_LINE = 1 << 30
MAX_TOKEN_LINE = 1 << 10


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

    def receive(self, limit: int = MAX_LINE) -> dict[str, Any]:
        """Returns the next message.

        Raises:
          Closed: there is none, it is longer than `limit` bytes, or it is not an object in JSON.
        """
        try:
            line = self._file.readline(limit)
        except OSError as error:
            raise Closed(str(error)) from None
        if not line.endswith(b"\n"):
            raise Closed("the connection ended" if len(line) < limit else "a line is too long")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise Closed(f"not JSON: {error}") from None
        if not isinstance(message, dict):
            raise Closed("not an object")
        return message

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
