"""Reads and writes .npy files. Does not use `np.save`, because its errors hide why a write failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxir.core.errors import UserError


def read_npy(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Opens an array of this dtype and shape, memory-mapped."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; copy its directory again, or make it again")
    try:
        found = np.load(path, mmap_mode="r")
    except Exception as error:  # numpy reads the header with Python's parser, which raises various errors
        raise UserError(f"{path} cannot be read: {error}; copy it again, or make it again") from None
    if not isinstance(found, np.ndarray):
        raise UserError(f"{path} is an archive of arrays, not one array; make it again")
    if found.dtype != dtype or found.shape != shape:
        expected = f"{np.dtype(dtype)} {shape}"
        raise UserError(f"{path.name} is {found.dtype} {found.shape}, not {expected}; make it again")
    return found


def write_npy(file: IO[bytes], parts: Sequence[np.ndarray]) -> None:
    """Writes arrays [n_i, ...] as the one array [sum n_i, ...] of a .npy file."""
    stream_npy(file, (sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype, parts)


def stream_npy(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype, parts: Iterable[np.ndarray]) -> None:
    """Like `write_npy`, for parts that are computed one by one; `shape` is the shape of the whole array."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for piece in pieces(parts, 65_536):
        file.write(np.ascontiguousarray(piece).data)


def pieces(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Splits each array [n, ...] into pieces of at most `size` rows, and yields them."""
    for array in arrays:
        for at in range(0, len(array), size):
            yield array[at : at + size]


def gather(shards: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Returns vectors as float32 [len(rows), D]; `rows` are row numbers in the concatenated shards."""
    starts = np.cumsum([0, *map(len, shards)])
    of_shard = np.searchsorted(starts, rows, side="right") - 1
    found = np.empty((len(rows), shards[0].shape[1]), np.float32)
    for shard in np.unique(of_shard):
        there = of_shard == shard
        found[there] = shards[shard][rows[there] - starts[shard]]
    return found
