"""Temporary files and directories beside an output, which hold the output until it is complete.

The writing process locks them. The next process that writes an output there removes unlocked ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.storage.locks import open_locked

# Seconds after which the temporary outputs of other hosts are removed. Other hosts' locks may be invisible
# here, and a container may get a new host name each time.
ABANDONED_AFTER = 86_400.0
ATTEMPTS = 20  # number of attempts to remove a directory in which a library's threads still create files
ATTEMPT_SECONDS = 0.1  # seconds between two attempts to remove a directory
_NAME = re.compile(r"\..+?\.(?:([0-9a-f]{8})\.)?[0-9a-f]{12}\.part", re.DOTALL)


@contextlib.contextmanager
def temporary_output(path: Path, *, directory: bool, mode: int = 0o777) -> Iterator[tuple[Path, int]]:
    """Yields a new locked file or directory beside `path`, and its descriptor.

    The caller renames or removes it.
    """
    _remove_abandoned(path.parent)
    flags = os.O_RDONLY if directory else os.O_RDWR | os.O_CREAT | os.O_EXCL
    while True:
        temporary = path.with_name(f".{path.name[:48]}.{_host()}.{secrets.token_hex(6)}.part")
        if directory:
            temporary.mkdir(mode)
        # Another process removed it before this one locked it.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            descriptor = open_locked(temporary, flags)
            break
    try:
        yield temporary, descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_directory(near: Path | None = None) -> Iterator[Path]:
    """Yields an empty directory that only this user can read, in `near` (None: in $TMPDIR or /tmp).

    Raises:
      UserError: `near` is None, and no directory for temporary files is writable.
    """
    try:
        place = Path(tempfile.gettempdir()) if near is None else near
    except FileNotFoundError as error:
        raise UserError(
            "no directory for temporary files is writable: set TMPDIR to one, or make /tmp writable (in a"
            " container with a read-only root, mount a volume there)"
        ) from error
    with temporary_output(place / "jaxir", directory=True, mode=0o700) as (temporary, _):
        try:
            yield temporary
        finally:
            remove_directory(temporary)


def remove_directory(path: Path) -> None:
    """Removes a local directory and its contents, as far as the system permits.

    After an interrupt, threads of Orbax or TensorFlow may still create files in it for a moment.
    """
    for _ in range(ATTEMPTS):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(ATTEMPT_SECONDS)


def is_temporary(name: str) -> bool:
    """Whether a name belongs to a temporary output or to an output's lock file."""
    return bool(_NAME.fullmatch(name)) or (name.startswith(".") and name.endswith(".held"))


def _remove_abandoned(directory: Path) -> None:
    """Removes temporary outputs that killed processes left in a directory."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found and (found[1] == _host() or _age(Path(entry.path)) > ABANDONED_AFTER):
                with contextlib.suppress(OSError):  # A locked output is still being written.
                    _remove_unlocked(Path(entry.path), directory=entry.is_dir(follow_symlinks=False))


def _remove_unlocked(path: Path, *, directory: bool) -> None:
    descriptor = open_locked(path, os.O_RDONLY if directory else os.O_RDWR)  # NFS locks only writable files
    try:
        remove_directory(path) if directory else path.unlink()
    finally:
        os.close(descriptor)


def _age(path: Path) -> float:
    """Returns the seconds since a file, or anything below a directory, was changed."""
    return time.time() - max(found.lstat().st_mtime for found in (path, *path.rglob("*")))


def _host() -> str:
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]
