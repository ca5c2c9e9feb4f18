"""Arrays on disk that are read part by part, so that a model may exceed a host's memory."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxir.core.errors import UserError

Index = tuple[slice, ...]
_AT_ONCE = 1 << 26  # bytes, as float32, that are read at a time


class LazyArray:
    """An array that is not yet loaded. Indexing by slices reads a part as float32; numpy functions read all.

    `read` returns a part, given one slice with start and stop for each dimension.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, shape: Sequence[int], read: Callable[[Index], np.ndarray]):
        self.shape, self._read = tuple(shape), read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.part(index, np.float32)

    def part(self, index: Any, dtype: Any) -> np.ndarray:
        """Returns the part at slices `index` in another type than float32."""
        given = index if isinstance(index, tuple) else () if index is ... else (index,)
        whole = (*given, *[slice(None)] * (self.ndim - len(given)))
        bounds = tuple(slice(*s.indices(n)[:2]) for s, n in zip(whole, self.shape, strict=True))
        return np.asarray(self._read(bounds), dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[...].astype(dtype or self.dtype, copy=False)

    def copy(self) -> np.ndarray:
        return np.array(self[...])

    def transpose(self, axes: None = None) -> "LazyArray":
        """Returns the lazy array with its dimensions in reverse order."""
        return LazyArray(self.shape[::-1], lambda index: self._read(index[::-1]).T)

    T = property(transpose)

    def exchanged(self, one: int, other: int) -> "LazyArray":
        """Returns the lazy array [N, ...] with two rows exchanged."""

        def read(index: Index) -> np.ndarray:
            rows, rest = index[0], index[1:]
            found, begin = np.array(self._read(index)), rows.start
            for here, there in ((one, other), (other, one)):
                if begin <= here < rows.stop:
                    found[here - begin] = self._read((slice(there, there + 1), *rest))[0]
            return found

        return LazyArray(self.shape, read)

    def split(self, ends: Sequence[int]) -> list["LazyArray"]:
        """Returns the parts of the last dimension that `ends` separate, as `numpy.split` does.

        Sizes in shapes are Python's int, because a fingerprint hashes their text.
        """

        def between(start: int, stop: int) -> LazyArray:
            def read(index: Index) -> np.ndarray:
                last = slice(index[-1].start + start, index[-1].stop + start)
                return self._read((*index[:-1], last))

            return LazyArray((*self.shape[:-1], stop - start), read)

        return [between(*ends) for ends in itertools.pairwise([0, *map(int, ends), self.shape[-1]])]

    def layer(self, i: int) -> "LazyArray":
        """Returns element `i` of the first dimension as a lazy array."""
        return LazyArray(self.shape[1:], lambda index: self._read((slice(i, i + 1), *index))[0])


def in_file(
    path: Path, dtype: np.dtype, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> LazyArray:
    """Returns a lazy array whose numbers are plain bytes of a file; parts are read by mapping the file.

    `offset` counts bytes; `strides` counts numbers from one element to the next along each dimension.
    """
    steps = [stride * dtype.itemsize for stride in strides]
    extent = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + dtype.itemsize

    def read(index: Index) -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, np.float32)[index]
        _check_floating(path, dtype, shape)
        mapped = np.memmap(path, np.uint8, "r", offset, (extent,))
        return np.array(np.ndarray(shape, dtype, mapped, 0, steps)[index], np.float32)

    return LazyArray(shape, read)


def in_memory(path: Path, array: np.ndarray) -> LazyArray:
    """Returns a lazy array over one that was read from a file; integers are refused as by `in_file`."""

    def read(index: Index) -> np.ndarray:
        _check_floating(path, array.dtype, array.shape)
        return np.array(array[index], np.float32)  # a copy, which the caller may write to

    return LazyArray(array.shape, read)


def _check_floating(path: Path, dtype: np.dtype, shape: Sequence[int]) -> None:
    """Refuses integers: they are ids, or quantised weights without their scale."""
    if not jax.dtypes.issubdtype(dtype, np.floating):
        raise UserError(
            f"{path}: an array {list(shape)} in it holds numbers of type {dtype}; weights must be"
            " floating-point numbers: use unquantised weights"
        )


def stack(parts: Sequence[Any]) -> LazyArray:
    """Returns arrays of one shape, stacked along a new first dimension, as one lazy array."""
    return LazyArray(
        (len(parts), *parts[0].shape),
        lambda index: np.stack([np.asarray(part[index[1:]]) for part in parts[index[0]]]),
    )


def loaded(value: Any, dtype: Any = np.float32, index: Index = ()) -> np.ndarray:
    """Returns the part `index` of an array, which may be lazy, as `dtype`; reads a large one in pieces."""
    if not isinstance(value, LazyArray):
        return np.asarray(value[index], dtype)
    shape = np.broadcast_to(np.False_, value.shape)[index].shape
    if 4 * math.prod(shape) <= _AT_ONCE:
        return value.part(index, dtype)
    first = index[0].indices(value.shape[0])[0] if index else 0
    found, rows = aligned(shape, dtype), max(1, _AT_ONCE // (4 * math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        found[start:stop] = value.part((slice(first + start, first + stop), *index[1:]), dtype)
    return found


def aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an empty array aligned to 64 bytes, because JAX on a CPU uses such arrays without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def place(value: Any, sharding: jax.sharding.Sharding, dtype: Any = np.float32) -> jax.Array:
    """Returns `value`, which may be lazy, on the devices of `sharding`, as `dtype`.

    A process reads only the parts of its own devices, and each part once.
    """
    read: dict[Any, np.ndarray] = {}

    def part(index: Index) -> np.ndarray:
        key = tuple((s.start or 0, s.stop) for s in index)
        if key not in read:
            read[key] = loaded(value, dtype, index)
        return read[key]

    return jax.make_array_from_callback(value.shape, sharding, part)
