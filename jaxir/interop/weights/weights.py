"""Reads a folder's weights in any format, writes safetensors, and reads and writes JSON files."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from jaxir.core.errors import UserError
from jaxir.interop.weights import flax_msgpack, torch_zip
from jaxir.interop.weights.lazy import Index, LazyArray
from jaxir.storage.files import inside
from jaxir.storage.json_files import read_json

SINGLE = "model.safetensors"
# Supported types; integers would be ids, or quantised weights without scales.
_FLOATS = ("F64", "F32", "F16", "BF16")
_GIT_LFS = b"version https://git-lfs"


class _Format(NamedTuple):
    """A format: the names of a single file and of an index of several, and how to open one."""

    single: str
    index: str
    open: Callable[[Path], dict[str, LazyArray]]
    to_torch: Callable[[Mapping[str, LazyArray]], dict[str, LazyArray]] = dict


def read_tensors(directory: Path) -> dict[str, LazyArray]:
    """Opens the weights of `directory`: safetensors, else torch's zip files, else Flax's msgpack.

    The weights are one file, or several files that an index names. Names are torch's. Only names and shapes
    are read until a tensor is used. No code in a file is run.
    """
    for form in _FORMATS:
        if (directory / form.single).is_file():
            return form.to_torch(_open(form, directory / form.single))
        if (directory / form.index).is_file():
            return form.to_torch(_open_several(form, directory))
    raise UserError(
        f"{directory}: no weights in it (expected {', '.join(single for single, _ in FILES)}); give another"
    )


def _open_several(form: _Format, directory: Path) -> dict[str, LazyArray]:
    index = directory / form.index
    weight_map = require(read_json(index), "weight_map", index)
    files = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
    for name in files:
        if not Path(inside(directory, name, said_by=index)).is_file():
            raise UserError(f"{directory / name}: no such file, though {form.index} names it; copy it, too")
    tensors: dict[str, LazyArray] = {}
    for file in sorted(set(files)):
        held = _open(form, directory / file)
        # Another file may hold an outdated tensor of the same name.
        tensors |= {name: value for name, value in held.items() if weight_map.get(name) == file}
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise UserError(f"{index}: no file holds {missing[0]}; copy the folder again")
    return tensors


def _open(form: _Format, path: Path) -> dict[str, LazyArray]:
    try:
        with path.open("rb") as file:
            if file.read(len(_GIT_LFS)) == _GIT_LFS:
                raise UserError(f"{path} is a pointer of Git LFS: fetch the file with `git lfs pull`")
        return form.open(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def open_safetensors(path: Path) -> dict[str, LazyArray]:
    """Opens a safetensors file; a tensor is read when it is used."""

    def lazy(name: str, shape: Sequence[int]) -> LazyArray:
        def read(index: Index) -> np.ndarray:
            with _opened(path) as file:
                if (kind := file.get_slice(name).get_dtype()) not in _FLOATS:
                    raise UserError(
                        f"{path}: {name:.100} holds numbers of type {kind}; use weights of type"
                        f" {', '.join(_FLOATS)}"
                    )
                return file.get_slice(name)[index] if index else file.get_tensor(name)

        return LazyArray(shape, read)

    with _opened(path) as file:
        names = file.keys()
        return {name: lazy(name, file.get_slice(name).get_shape()) for name in names}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, "np") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; copy the folder again") from error
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: truncated, or not a safetensors file ({error}); copy it again") from error


_FORMATS = (
    _Format(SINGLE, f"{SINGLE}.index.json", open_safetensors),
    _Format("pytorch_model.bin", "pytorch_model.bin.index.json", torch_zip.open_file),
    _Format(
        "flax_model.msgpack", "flax_model.msgpack.index.json", flax_msgpack.open_file, flax_msgpack.to_torch
    ),
)
# In order of preference: the name of a single file, and of an index of several.
FILES = tuple((form.single, form.index) for form in _FORMATS)


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Writes one safetensors file of float32 arrays, which may be lazy.

    The library's function needs all tensors in memory; this one reads and writes one at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + 4 * math.prod(tensors[name].shape)
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in sorted(tensors):
                file.write(np.ascontiguousarray(tensors[name], "<f4").data)
    except OSError as error:
        raise UserError(
            f"{path.name} could not be written: {error.strerror or error}; remove the cause"
        ) from error


def read_optional_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one if there is no such file."""
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require(content: Any, key: str, path: Path) -> Any:
    """Returns content[key]; `content` was read from `path`."""
    if not isinstance(content, dict) or key not in content:
        raise UserError(f"{path}: {key!r} is missing; copy the file again")
    return content[key]
