"""Files as their readers open them: what the system says names the file, no pipe is waited for in vain."""

from __future__ import annotations

import hashlib
import io
import os
import select
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from jaxir.files import is_bucket

PIPE_SECONDS = 2


def open_to_read(path: Path) -> IO[bytes]:
    """Opens a file to read its bytes; `path` may be in a bucket.

    A named pipe that nothing writes to is an empty file: to open it in the usual way would wait for ever.
    Who is to write to it has `PIPE_SECONDS` to begin.

    Raises:
      OSError: it cannot be opened, or, later, be read. It has the file's name, which Python leaves out of
        what happens in reading.
    """
    return (
        path.open("rb")
        if is_bucket(path)
        else io.BufferedReader(_File(os.fspath(path), opener=_opened), 1 << 16)
    )


def read_text(path: Path, errors: str = "strict") -> str:
    """Returns the text of a UTF-8 file.

    Raises:
      OSError: as `open_to_read`.
      UnicodeDecodeError: it is not UTF-8.
    """
    with open_to_read(path) as file:
        return file.read().decode("utf-8", errors)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, as text.

    Raises:
      OSError: as `open_to_read`.
    """
    digest = hashlib.sha256()
    with open_to_read(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_readable(path: Path) -> None:
    """Checks that a local file can be opened later; of a pipe, only that it is there.

    Raises:
      OSError: it cannot.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        open_to_read(path).close()


class _File(io.FileIO):
    def readinto(self, buffer: Any) -> int | None:
        return self._told(super().readinto, buffer)

    def readall(self) -> bytes | None:
        return self._told(super().readall)

    def _told(self, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.name) from error


def _opened(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll(PIPE_SECONDS * 1000)
    os.set_blocking(descriptor, True)
    return descriptor
