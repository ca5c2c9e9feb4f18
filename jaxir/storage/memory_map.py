"""Memory-mapped .npy files, looked at before they are read.

Where a mapped file has been cut, whoever reads beyond its new end dies of SIGBUS; where it was written to,
other numbers come. So who reads such arrays again and again has `check_unchanged` look first, before each
part. A file that is cut while a part is being read still ends the process: the system's own copies, which
would rule that out, take twice the time of reading from a mapping, and make a search by few queries a third
slower.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxir.core.errors import ChangedError


class _Origin(NamedTuple):
    """The file of a mapping, as it was when it was mapped."""

    path: Path
    inode: tuple[int, int]
    modified: int


_ORIGINS: weakref.WeakKeyDictionary[mmap.mmap, _Origin] = weakref.WeakKeyDictionary()


def open_mapped(path: Path) -> np.ndarray:
    """Opens the array of a .npy file, memory-mapped, for reading; of an archive it returns what numpy does.

    Raises:
      OSError, ValueError, EOFError: numpy's, for what is no such file.
    """
    place = path.absolute()
    found = place.stat()
    array = np.load(place, mmap_mode="r")
    if (mapping := _mapping(array)) is not None:
        _ORIGINS[mapping] = _Origin(place, (found.st_dev, found.st_ino), found.st_mtime_ns)
    return array


def check_unchanged(arrays: Iterable[np.ndarray]) -> None:
    """Checks that the files of arrays are what they were when they were opened; two system calls each.

    A file that was removed, or in whose place another was put, is still there for who has it mapped.

    Args:
      arrays: of `open_mapped`, views of such, or others, which are not looked at.

    Raises:
      ChangedError: one was cut or written to.
    """
    for array in arrays:
        mapping = _mapping(array)
        origin = None if mapping is None else _ORIGINS.get(mapping)
        if origin is None:
            continue
        if mapping.size() < len(mapping):
            raise ChangedError(origin.path)
        try:
            found = origin.path.stat()
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == origin.inode and found.st_mtime_ns != origin.modified:
            raise ChangedError(origin.path)


def pieces(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yields arrays [n, ...] in pieces of at most `size` rows, each looked at as by `check_unchanged`."""
    for array in arrays:
        for at in range(0, len(array), size):
            check_unchanged([array])
            yield array[at : at + size]


def _mapping(array: object) -> mmap.mmap | None:
    """Returns what an array is a view of, if that is a mapped file."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None
