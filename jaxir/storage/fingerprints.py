"""Hashes of data sets and plain values, which are compared instead of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

DIGITS = 16  # hexadecimal digits of a hash in messages and file names


def of_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns a hash (hex) of the names, types, shapes and numbers of arrays."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


class ValuesHash:
    """A hash of plain values, added one by one: texts, bytes, numbers, None, tuples and lists of them.

    Attributes:
      count: the number of values that were added.
    """

    def __init__(self):
        self.count = 0
        self._digest = hashlib.blake2b(digest_size=32)

    def add(self, value: object) -> None:
        self.count += 1
        self._digest.update(repr(value).encode() + b"\n")

    def hex(self) -> str:
        return self._digest.hexdigest()


def of_values(*values: object) -> str:
    """Returns a hash (hex) of plain values."""
    found = ValuesHash()
    for value in values:
        found.add(value)
    return found.hex()
