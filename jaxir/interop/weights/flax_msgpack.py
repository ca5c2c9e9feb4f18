"""The files that transformers' Flax models were saved to: msgpack, as flax.serialization writes it.

The tree is read, its arrays stay in the file. Names and layouts become those of torch, by the rules that
transformers itself converts by.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.weights import lazy
from jaxir.interop.weights.lazy import Index, LazyArray

# The last part of a name: Flax's, torch's. Kernels are transposed too.
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)} | {
    name: np.dtype(name)
    for name in (
        *("float16", "float32", "float64", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}
_CHUNKED = "__msgpack_chunked_array__"
_NDARRAY, _SCALAR = 1, 3  # flax's extension types
_MAX_DEPTH = 64
_AT_ONCE = 1 << 20  # numbers of an array in chunks
# First byte: how the length that follows it is packed; then that many bytes, or pairs.
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_ARRAYS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _Array(NamedTuple):
    """An array whose numbers lie in the file from `offset` on, the last dimension densest."""

    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]


class _Span(NamedTuple):
    """Bytes of the file."""

    offset: int
    size: int


def open_file(path: Path) -> dict[str, LazyArray]:
    """Returns the arrays of a tree by path ("encoder/block/0/layer/0/SelfAttention/q/kernel"), at rest.

    Raises:
      UserError: it is damaged, or something else.
      FileNotFoundError: there is none.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                tree = _Reader(content).tree()
            return {name: _lazy(path, leaf) for name, leaf in _leaves(tree)}
        except (ValueError, LookupError, TypeError, OverflowError, struct.error) as error:
            reason = "it ends too soon" if isinstance(error, struct.error) else f"{error!s:.100}"
            raise UserError(
                f"{path}: truncated or not what Flax writes of a model's parameters ({reason})"
            ) from error


def to_torch(tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns the arrays by the names that they have in torch, laid out as there."""
    renamed = {}
    for path, value in tensors.items():
        *above, leaf = path.split("/")
        renamed[".".join([*above, _LEAVES.get(leaf, leaf)])] = value.T if leaf == "kernel" else value
    return renamed


def _leaves(tree: Any, above: str = "") -> Iterator[tuple[str, _Array | dict[str, Any]]]:
    for name, value in tree.items():
        if isinstance(value, _Array) or (isinstance(value, dict) and _CHUNKED in value):
            yield f"{above}{name}", value
        elif isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}/")
        elif value is not None:
            raise ValueError(f"{above}{name} is no array")


def _lazy(path: Path, leaf: _Array | dict[str, Any]) -> LazyArray:
    if isinstance(leaf, _Array):
        return lazy.in_file(path, leaf.dtype, leaf.offset, leaf.shape)
    sizes, chunks = _in_order(leaf["shape"]), _in_order(leaf["chunks"])
    if not all(isinstance(n, int) and n >= 0 for n in sizes) or not all(
        isinstance(chunk, _Array) and len(chunk.shape) == 1 for chunk in chunks
    ):
        raise ValueError("an array in chunks that are none")
    if sum(chunk.shape[0] for chunk in chunks) != math.prod(sizes) or not sizes:
        raise ValueError("an array in chunks of another size")
    return _chunked([lazy.in_file(path, *chunk) for chunk in chunks], tuple(sizes))


def _in_order(found: dict[str, Any]) -> list[Any]:
    return [found[str(i)] for i in range(len(found))]


def _chunked(chunks: list[LazyArray], shape: tuple[int, ...]) -> LazyArray:
    """Returns the array of `shape` whose numbers stand in flat `chunks`, one after another."""
    ends = np.cumsum([chunk.size for chunk in chunks]).tolist()
    width = math.prod(shape[1:])

    def numbers(start: int, stop: int) -> np.ndarray:
        parts = [
            chunk[max(start - end + chunk.size, 0) : stop - end + chunk.size]
            for chunk, end in zip(chunks, ends, strict=True)
            if start < end and stop > end - chunk.size
        ]
        return np.concatenate([np.empty(0, np.float32), *parts])

    def read(index: Index) -> np.ndarray:
        # Few rows at a time: a small part of each may be all that is wanted.
        rows, rest = index[0], index[1:]
        found = np.empty([s.stop - s.start for s in index], np.float32)
        at_once = max(1, _AT_ONCE // max(1, width))
        for start in range(rows.start, rows.stop, at_once):
            stop = min(start + at_once, rows.stop)
            part = numbers(start * width, stop * width).reshape(-1, *shape[1:])
            found[start - rows.start : stop - rows.start] = part[:, *rest]
        return found

    return LazyArray(shape, read)


class _Reader:
    """Reads msgpack; of an array only where it lies."""

    def __init__(self, content: mmap.mmap):
        self._content, self._at = content, 0

    def tree(self) -> dict[str, Any]:
        """Reads the whole."""
        tree = self._value(0)
        if not isinstance(tree, dict) or self._at != len(self._content):
            raise ValueError("no tree, or more than one")
        return tree

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} levels")
        kind = self._number(">B")
        if kind < 0x80 or kind >= 0xE0:
            return kind if kind < 0x80 else kind - 0x100
        if kind < 0x90 or kind in _MAPS:
            return self._map(kind & 15 if kind < 0x90 else self._number(_MAPS[kind]), depth)
        if kind < 0xA0 or kind in _ARRAYS:
            count = kind & 15 if kind < 0xA0 else self._number(_ARRAYS[kind])
            return [self._value(depth + 1) for _ in range(count)]
        if kind < 0xC0 or kind in _TEXTS:
            return self._text(kind & 31 if kind < 0xC0 else self._number(_TEXTS[kind]))
        if kind in _BYTES:
            return self._skip(self._number(_BYTES[kind]))
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind in _CONSTANTS:
            return _CONSTANTS[kind]
        if kind in _EXTENSIONS:
            return self._extension(self._number(_EXTENSIONS[kind]), depth)
        if kind in _FIXED_EXTENSIONS:
            return self._extension(_FIXED_EXTENSIONS[kind], depth)
        raise ValueError(f"a byte {kind:#x}")

    def _number(self, packed: str) -> Any:
        (value,) = struct.unpack_from(packed, self._content, self._at)
        self._at += struct.calcsize(packed)
        return value

    def _skip(self, size: int) -> _Span:
        span = _Span(self._at, size)
        self._at += size
        if self._at > len(self._content):
            raise ValueError("it ends too soon")
        return span

    def _text(self, size: int) -> str:
        start, size = self._skip(size)
        text = self._content[start : start + size].decode()
        if not text.isprintable():
            raise ValueError("a text that cannot be printed")
        return text

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        found = {}
        for _ in range(count):
            name = self._value(depth + 1)
            if not isinstance(name, str) or name in found:
                raise ValueError("a name that is no text, or stands twice")
            found[name] = self._value(depth + 1)
        return found

    def _extension(self, size: int, depth: int) -> _Array:
        code = self._number(">b")
        end = self._at + size
        if code not in (_NDARRAY, _SCALAR):
            raise ValueError(f"a value of type {code}")
        match self._value(depth + 1):
            case [list(shape), str(name), _Span(offset, length)] if name in _DTYPES:
                dtype = _DTYPES[name]
            case _:
                raise ValueError("an array of another kind")
        if not all(isinstance(n, int) and n >= 0 for n in shape) or self._at != end:
            raise ValueError("an array of an impossible shape")
        if math.prod(shape) * dtype.itemsize != length:
            raise ValueError("an array of another size than its shape")
        return _Array(dtype, offset, tuple(shape))
