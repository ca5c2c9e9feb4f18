"""Arrays on disk that are read part by part, so that a model may exceed a host's memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxir.core.errors import UserError

Index = tuple[slice, ...]


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
        given = index if isinstance(index, tuple) else () if index is ... else (index,)
        whole = (*given, *[slice(None)] * (self.ndim - len(given)))
        bounds = tuple(slice(*s.indices(n)[:2]) for s, n in zip(whole, self.shape, strict=True))
        return np.asarray(self._read(bounds), np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[...].astype(dtype or self.dtype, copy=False)

    def copy(self) -> np.ndarray:
        return np.array(self[...])

    def transpose(self, axes: None = None) -> "LazyArray":
        """Returns the lazy array with its dimensions in reverse order."""
        return LazyArray(self.shape[::-1], lambda index: self._read(index[::-1]).T)

    T = property(transpose)

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


def place(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns `value`, which may be lazy, on the devices of `sharding`.

    A process reads only the parts of its own devices, and each part once.
    """
    read: dict[Any, np.ndarray] = {}

    def part(index: Index) -> np.ndarray:
        key = tuple((s.start or 0, s.stop) for s in index)
        if key not in read:
            read[key] = np.asarray(value[index], np.float32)
        return read[key]

    return jax.make_array_from_callback(value.shape, sharding, part)
