"""Directories that one process works in at a time, and outputs that one process writes, on a disk.

In a bucket there are leases (`leases`). `filelock` isn't used: docs/durability.md says why.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError

_MADE: list[list[Path]] = []  # directories that held locks made
_DESCRIPTORS: list[int] = []  # of held locks
_WRITTEN: set[Path] = set()  # outputs that are held


class Lock(NamedTuple):
    """A directory that is held."""

    directory: Path
    descriptor: int

    def check(self) -> None:
        """Checks that it is still there: what is written would come into another one, or into a new one.

        Raises:
          UserError: it has been removed or replaced.
        """
        try:
            if os.path.samestat(os.fstat(self.descriptor), self.directory.stat()):
                return
        except FileNotFoundError:
            pass
        raise UserError(
            f"{self.directory} was removed or replaced while this process worked in it; start anew"
        )


@contextlib.contextmanager
def locked(directory: Path, refusal: str) -> Iterator[Lock]:
    """Holds a directory for this process while in force; the system lets go of it if the process is killed.

    It is made where it is missing, and removed again if nothing has come into it.

    Args:
      directory: a local one.
      refusal: what to say where another process holds it.

    Raises:
      UserError: another process holds it, or it is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    descriptor = _hold(directory, os.O_RDONLY, refusal, directory=True)
    _MADE.append(made)
    _DESCRIPTORS.append(descriptor)
    try:
        yield Lock(directory, descriptor)
    finally:
        _MADE.remove(made)
        _DESCRIPTORS.remove(descriptor)
        _remove_empty(made)
        os.close(descriptor)


@contextlib.contextmanager
def writing(output: Path) -> Iterator[None]:
    """Holds an output that appears only when whole for this process while in force, wherever it is asked.

    Missing directories above it are made, and removed again if nothing has come into them.

    Args:
      output: a local path.

    Raises:
      UserError: another process is writing it.
    """
    place = Path(os.path.realpath(output))
    if place in _WRITTEN:
        yield
        return
    made = [path for path in place.parents if not path.exists()]
    digest = hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16]
    holder = place.with_name(f".{place.name[:48]}.{digest}.held")
    _MADE.append(made)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = _hold(holder, flags, f"another process is writing {output}")
        _WRITTEN.add(place)
        try:
            yield
        finally:
            _WRITTEN.discard(place)
            holder.unlink(missing_ok=True)
            os.close(descriptor)
    finally:
        _MADE.remove(made)
        _remove_empty(made)


def descriptors() -> tuple[int, ...]:
    """Returns what holds the locks of this process: a child that inherits it holds them with it."""
    return tuple(_DESCRIPTORS)


def leave_nothing_empty() -> None:
    """Removes directories that were made for locks and into which nothing has come.

    For a process that ends without unwinding.
    """
    for made in reversed(_MADE):
        _remove_empty(made)


def _remove_empty(made: list[Path]) -> None:
    with contextlib.suppress(OSError):  # there is something in it
        for path in made:
            path.rmdir()


def open_locked(path: Path, flags: int, *, warn: bool = False) -> int:
    """Opens a file or directory and locks it until the returned descriptor is closed.

    Args:
      path: the file or directory.
      flags: as for `os.open`.
      warn: whether to warn where the file system has no locks.

    Raises:
      BlockingIOError: another process holds the lock.
      FileNotFoundError: nothing is there, or it was removed before it was locked.
    """
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as error:  # the file system has no locks
        if warn:
            print(
                f"warning: {path} cannot be locked there ({error.strerror.lower()}): see to it that no other"
                " process works in it",
                file=sys.stderr,
            )
        return descriptor
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _hold(path: Path, flags: int, refusal: str, *, directory: bool = False) -> int:
    """Opens and locks a path, made where it is missing; raises a UserError if another process holds it."""
    while True:
        (path if directory else path.parent).mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the process that held it has removed it
            try:
                return open_locked(path, flags, warn=directory)
            except BlockingIOError:
                raise UserError(refusal) from None
