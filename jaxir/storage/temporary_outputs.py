"""Hidden files and directories beside an output, where it is written until it is whole.

Each is locked by who writes it, and so is a file that holds the output's name for a command that works long.
What a killed process has left is unlocked, and goes when the next output is written into the same directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Of other machines (that of containers may be new each time), whose locks some file systems do not show.
ABANDONED_AFTER = 86_400.0  # seconds without a change
_NAME = re.compile(r"\..+?\.(?:([0-9a-f]{8})\.)?[0-9a-f]{12}\.part", re.DOTALL)
_HELD_NAME = re.compile(r"\..+?\.[0-9a-f]{16}\.held", re.DOTALL)
ATTEMPTS = 20  # who removes what was abandoned holds it for a moment


@contextlib.contextmanager
def held_directory(path: Path) -> Iterator[Path]:
    """Yields a new directory beside `path`, locked meanwhile. Who asks for it renames or removes it."""
    aside, descriptor = _made(path, directory=True)
    try:
        yield aside
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_file(path: Path) -> Iterator[tuple[Path, int]]:
    """Yields a new file beside `path`, locked meanwhile, and a descriptor of it for the caller to close."""
    aside, descriptor = _made(path, directory=False)
    try:
        yield aside, os.dup(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_directory(near: Path | None = None) -> Iterator[Path]:
    """Yields an empty directory, this user's own, in `near` (None: where the system has such).

    It is removed afterwards; that of a killed process goes when the next is made there.
    """
    place = Path(tempfile.gettempdir()) if near is None else near
    aside, descriptor = _made(place / "jaxir", directory=True, mode=0o700)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(descriptor)


@contextlib.contextmanager
def held_name(path: Path) -> Iterator[None]:
    """Holds the name of an output that is not there yet against other processes that ask for it likewise.

    Raises:
      BlockingIOError: another process holds it.
    """
    _remove_abandoned(path.parent)
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
    holder = path.with_name(f".{path.name[:48]}.{digest}.held")
    descriptor = _locked(holder)
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        os.close(descriptor)


def is_aside(name: str) -> bool:
    """Returns whether a file or directory of this name is one of those that are made here."""
    return bool(_NAME.fullmatch(name) or _HELD_NAME.fullmatch(name))


def _locked(path: Path) -> int:
    """Returns a descriptor of a file, made where it is missing, that this process has locked."""
    for attempt in range(1, ATTEMPTS + 1):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if attempt == ATTEMPTS:
                raise
            time.sleep(0.01)
            continue
        except OSError:  # a file system without locks: nobody else gets one either
            return descriptor
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # whoever held it before has removed it
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))


def _made(path: Path, *, directory: bool, mode: int = 0o777) -> tuple[Path, int]:
    _remove_abandoned(path.parent)
    while True:
        aside = path.with_name(f".{path.name[:48]}.{_machine()}.{secrets.token_hex(6)}.part")
        if directory:
            aside.mkdir(mode)
            try:
                descriptor = os.open(aside, os.O_RDONLY)
            except FileNotFoundError:  # another process took it for abandoned before it was locked
                continue
        else:
            descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks: nobody else gets one either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, aside):
            return aside, descriptor
        os.close(descriptor)  # likewise


def _remove_abandoned(directory: Path) -> None:
    """Removes what killed processes have left in a directory, as far as it can."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            here = (found and found[1] == _machine()) or _HELD_NAME.fullmatch(entry.name)
            if here or (found and _age(entry.path) > ABANDONED_AFTER):
                with contextlib.suppress(OSError):
                    _remove_unlocked(Path(entry.path), directory=entry.is_dir(follow_symlinks=False))


def _remove_unlocked(path: Path, *, directory: bool) -> None:
    kind = os.O_RDONLY | os.O_DIRECTORY if directory else os.O_RDWR  # NFS locks what may be written
    descriptor = os.open(path, kind | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(descriptor, path):  # it has its own name by now
            return
        if directory:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _age(path: str) -> float:
    """Returns the seconds since a file, or anything below a directory, was changed."""
    newest = os.lstat(path).st_mtime
    for place, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                newest = max(newest, Path(place, name).lstat().st_mtime)
    return time.time() - newest


def _machine() -> str:
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]
