"""Directories that one process works in at a time, and outputs that one writes, on a disk.

In a bucket there are leases (`leases`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError
from jaxir.storage import temporary_outputs

_MADE: list[list[Path]] = []  # for locks that are held
_DESCRIPTORS: list[int] = []  # of them
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
    descriptor = _lock(directory, refusal)
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
    place.parent.mkdir(parents=True, exist_ok=True)
    _MADE.append(made)
    try:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(temporary_outputs.held_name(place))
            except BlockingIOError:
                raise UserError(f"another process is writing {output}") from None
            _WRITTEN.add(place)
            held.callback(_WRITTEN.discard, place)
            yield
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


def _lock(directory: Path, refusal: str) -> int:
    """Returns a descriptor of the directory that holds the lock."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(refusal) from None
        except OSError as error:  # NFS locks no directories, and others nothing at all
            print(
                f"warning: {directory} cannot be locked there ({error.strerror.lower()}): see to it that no"
                " other process works in it",
                file=sys.stderr,
            )
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), directory.stat()):
                return descriptor
        os.close(descriptor)  # whoever held it before has removed it
