"""Locks on local directories and outputs; leases (`leases.py`) do the same in buckets.

docs/durability.md says why jaxir calls `flock` on the directory itself and does not use `filelock`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError

_MADE: list[list[Path]] = []  # directories that were created for the locks of this process
_DESCRIPTORS: list[int] = []  # open descriptors of the directories that this process has locked
_WRITTEN: set[Path] = set()  # outputs that this process has locked


class Lock(NamedTuple):
    directory: Path
    descriptor: int

    def check(self) -> None:
        """Raises a UserError if the directory was removed or replaced since it was locked."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.descriptor), self.directory.stat()):
                return
        raise UserError(
            f"{self.directory} was removed or replaced while this process worked in it; run the command again"
        )


@contextlib.contextmanager
def locked(directory: Path, refusal: str) -> Iterator[Lock]:
    """Locks a local directory; raises a UserError with `refusal` if another process holds it.

    A missing directory is created, and removed at the end if it is empty.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give another, or remove it first")
    created = _missing([directory, *directory.parents])
    descriptor = _lock(directory, os.O_RDONLY, refusal, directory=directory)
    _DESCRIPTORS.append(descriptor)
    try:
        with _removing_empty(created):
            yield Lock(directory, descriptor)
    finally:
        _DESCRIPTORS.remove(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def writing(output: Path) -> Iterator[None]:
    """Locks a local output against other processes while it is written; calls in a process may nest."""
    place = Path(os.path.realpath(output))
    if place in _WRITTEN:
        yield
        return
    digest = hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16]
    holder = place.with_name(f".{place.name[:48]}.{digest}.held")
    with _removing_empty(_missing(place.parents)):
        flags, refusal = os.O_RDWR | os.O_CREAT, f"another process is writing {output}"
        descriptor = _lock(holder, flags, refusal, directory=holder.parent)
        _WRITTEN.add(place)
        try:
            yield
        finally:
            _WRITTEN.discard(place)
            holder.unlink(missing_ok=True)
            os.close(descriptor)


def descriptors() -> tuple[int, ...]:
    """Returns the descriptors of locked directories; a child that inherits them holds the locks too."""
    return tuple(_DESCRIPTORS)


def leave_nothing_empty() -> None:
    """Removes empty directories that were created for locks; for a process that ends by `os._exit`."""
    for created in reversed(_MADE):
        _remove_empty(created)


def _missing(directories: Iterable[Path]) -> list[Path]:
    return [path for path in directories if not path.exists()]


@contextlib.contextmanager
def _removing_empty(created: list[Path]) -> Iterator[None]:
    """Removes directories at the end, innermost first, if they are empty."""
    _MADE.append(created)
    try:
        yield
    finally:
        _MADE.remove(created)
        _remove_empty(created)


def _remove_empty(directories: list[Path]) -> None:
    with contextlib.suppress(OSError):  # a directory is not empty
        for path in directories:
            path.rmdir()


def open_locked(path: Path, flags: int, *, warn: bool = False) -> int:
    """Opens a file or directory and locks it until the returned descriptor is closed.

    With `warn`, a file system that has no locks is reported on standard error.

    Raises:
      BlockingIOError: another process holds the lock.
      FileNotFoundError: nothing exists there, or it was removed before it was locked.
    """
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as error:  # The file system has no locks, so no process can hold one.
        if warn:
            print(
                f"warning: {path} cannot be locked ({error.strerror.lower()}): make sure that no other"
                " process works in it",
                file=sys.stderr,
            )
        return descriptor
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _lock(path: Path, flags: int, refusal: str, *, directory: Path) -> int:
    """Creates `directory`, then opens and locks a path; returns the path's descriptor."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # Another process has just removed it.
            try:
                return open_locked(path, flags, warn=path == directory)
            except BlockingIOError:
                raise UserError(refusal) from None
