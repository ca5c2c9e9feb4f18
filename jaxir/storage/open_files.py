"""Files as their readers open them: errors of the system name the file, and pipes can be read again."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import IO

from jaxir.storage.files import is_bucket

PIPE_SECONDS = 2  # how long the writer of a named pipe has to begin
_COPYING = threading.Lock()
_COPIES: dict[tuple[int, int], int] = {}  # descriptors of copies, by the pipe's device and inode


def open_to_read(path: Path) -> IO[bytes]:
    """Opens a file to read its bytes; `path` may be in a bucket.

    A pipe is copied to a temporary file when it is opened first, and later opened there: most readers read a
    file several times. A named pipe that nothing writes to is an empty file, because to open it in the usual
    way would wait for ever. Its writer has `PIPE_SECONDS` to begin.

    Raises:
      OSError: it cannot be opened.
    """
    return path.open("rb") if is_bucket(path) else open(path, "rb", buffering=1 << 16, opener=_opened)


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


def _opened(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if stat.S_ISFIFO(status.st_mode):
        try:
            return os.open(_copied(descriptor, (status.st_dev, status.st_ino)), flags)
        finally:
            os.close(descriptor)
    os.set_blocking(descriptor, True)
    return descriptor


def _copied(descriptor: int, pipe: tuple[int, int]) -> str:
    """Returns a path of the copy of a pipe. The copy has no name on the disk and ends with the process."""
    with _COPYING:
        if pipe not in _COPIES:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            waiting.poll(PIPE_SECONDS * 1000)
            os.set_blocking(descriptor, True)
            with tempfile.TemporaryFile() as copy, open(descriptor, "rb", closefd=False) as content:
                shutil.copyfileobj(content, copy)
                copy.flush()
                if not copy.tell():  # nothing has written to the pipe yet
                    return os.devnull
                _COPIES[pipe] = os.dup(copy.fileno())
        return f"/proc/self/fd/{_COPIES[pipe]}"
