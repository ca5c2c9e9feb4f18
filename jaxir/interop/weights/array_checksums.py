"""A checksum of each stored array. It is the sum of its parts' checksums, however the array is cut.

An array's checksum is the sum, modulo 2^32, of a hash of each element's bits and position. The change of one
element always changes the sum; other damage goes unnoticed once in 2^32. The sum does not depend on how the
array is cut, sharded or read. It does not protect against deliberate changes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxir.core.errors import UserError

_STEP, _FACTOR = 0x9E3779B1, 0x7FEB352D  # odd factors, so no two 32-bit numbers have the same product
_BLOCK = 1 << 15  # elements hashed at a time, few enough for the processor's cache


def name_of(path: Sequence[Any]) -> str:
    """Returns Orbax's name of a leaf of a tree: its keys, joined by dots."""
    keys = (next(getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a)) for key in path)
    return ".".join(map(str, keys))


def of_array(x: jax.Array) -> jax.Array:
    """Returns the checksum of an array, uint32 []; to be called inside jit."""
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) * _STEP % 2**32)
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    mixed = bits + place
    mixed = (mixed ^ (mixed >> jnp.uint32(16))) * jnp.uint32(_FACTOR)
    return jnp.sum(mixed ^ (mixed >> jnp.uint32(15)), dtype=jnp.uint32)


def of_tree(tree: Any) -> dict[str, jax.Array]:
    """Returns the checksum of each leaf by its name, uint32 [] each; to be called inside jit."""
    return {name_of(path): of_array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def of_part(part: np.ndarray, starts: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the checksum of a part of an array of `shape`; the part begins at the indices `starts`."""
    if not part.size:
        return 0
    bits = np.ascontiguousarray(part).view(f"uint{8 * part.dtype.itemsize}")
    rows, columns = np.zeros((), np.uint32), np.zeros(1, np.uint32)
    for axis, (start, count) in enumerate(zip(starts, part.shape, strict=True)):
        stride = math.prod(shape[axis + 1 :])
        along = (np.arange(start, start + count, dtype=np.uint64) * np.uint64(stride * _STEP % 2**32)).astype(
            np.uint32
        )
        if axis == part.ndim - 1:
            columns = along
        else:
            rows = rows[..., None] + along
    rows, bits = rows.reshape(-1, 1), bits.reshape(-1, len(columns))
    total, high = 0, max(1, _BLOCK // max(1, len(columns)))
    for top in range(0, len(bits), high):
        for left in range(0, len(columns), _BLOCK):
            mixed = rows[top : top + high] + columns[left : left + _BLOCK]
            mixed += bits[top : top + high, left : left + _BLOCK]
            mixed ^= mixed >> np.uint32(16)
            mixed *= np.uint32(_FACTOR)
            mixed ^= mixed >> np.uint32(15)
            total += int(mixed.sum(dtype=np.uint64))
    return total % 2**32


class Reading:
    """Adds up the checksums of the parts of an array that are read, and compares the sum once all are read.

    A part that overlaps an earlier part starts a new sum. A process that reads only some parts checks none.
    """

    def __init__(self, where: str, shape: Sequence[int], expected: int):
        self._where, self._shape, self._expected = where, tuple(shape), expected
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._parts: list[tuple[slice, ...]] = []
        self._count = self._total = 0

    def add(self, index: tuple[slice, ...], part: np.ndarray) -> None:
        """Adds `part`, read at `index`. Raises a UserError if all parts are read and their sum is wrong."""
        total = of_part(part, [s.start for s in index], self._shape)
        with self._lock:
            for other in self._parts:
                if all(a.start < b.stop and b.start < a.stop for a, b in zip(index, other, strict=True)):
                    self._begin()
                    break
            self._parts.append(index)
            self._count += part.size
            self._total += total
            if self._count < math.prod(self._shape):
                return
            found = self._total % 2**32
            self._begin()
        if found != self._expected:
            raise UserError(
                f"{self._where} is damaged: its numbers changed after they were written; copy the directory"
                " again, or make it again"
            )
