"""Opens files for reading. A pipe is copied when it is first read, so that it can be read again."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import IO

from jaxir.storage.files import is_bucket

_COPYING = threading.Lock()
_COPIES: dict[tuple[int, int], int] = {}  # (device, inode) of each copied pipe -> its copy's descriptor


def open_to_read(path: Path) -> IO[bytes]:
    """Opens a file, a pipe or an object in a bucket to read its bytes; an OSError names the path."""
    return path.open("rb") if is_bucket(path) else open(path, "rb", buffering=1 << 16, opener=_opened)


def read_text(path: Path, errors: str = "strict") -> str:
    """Returns the text of a UTF-8 file; raises an OSError or UnicodeDecodeError."""
    with open_to_read(path) as file:
        return file.read().decode("utf-8", errors)


def sha256_of(path: Path) -> str:
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_readable(path: Path) -> None:
    """Raises an OSError if a local file cannot be opened; a pipe is not opened."""
    if not stat.S_ISFIFO(path.stat().st_mode):
        open_to_read(path).close()


def _opened(path: str, flags: int) -> int:
    status = Path(path).stat()
    pipe = (status.st_dev, status.st_ino)
    return os.open(_copied(path, pipe) if stat.S_ISFIFO(status.st_mode) else path, flags)


def _copied(path: str, pipe: tuple[int, int]) -> str:
    """Returns the path of a pipe's copy, an unnamed temporary file that exists until the process ends."""
    with _COPYING:
        if pipe not in _COPIES:
            with tempfile.TemporaryFile() as copy, Path(path).open("rb") as content:
                shutil.copyfileobj(content, copy)
                copy.flush()
                _COPIES[pipe] = os.dup(copy.fileno())
        return f"/proc/self/fd/{_COPIES[pipe]}"
