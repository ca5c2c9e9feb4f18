"""Reading and writing safetensors files, and the JSON files beside them."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from jaxir.errors import UserError
from jaxir.interop.lazy import Index, LazyArray

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_tensors(directory: Path) -> dict[str, LazyArray]:
    """Opens the weights of `directory`: one safetensors file, or several named by an index.

    Nothing but their shapes is read until they are used.

    Raises:
      UserError: there are none, or a file is missing, truncated or not safetensors.
    """
    if (directory / SINGLE).is_file():
        return _open_file(directory / SINGLE)
    if (directory / INDEX).is_file():
        weight_map = require(read_json(directory / INDEX), "weight_map", directory / INDEX)
        tensors: dict[str, LazyArray] = {}
        for name in sorted(set(weight_map.values())):
            tensors.update(_open_file(directory / name))
        missing = sorted(set(weight_map) - set(tensors))
        if missing:
            raise UserError(f"{directory / INDEX}: no file holds {missing[0]}")
        return tensors
    old = sorted(directory.glob("pytorch_model*.bin"))
    if old:
        raise UserError(
            f"{old[0]} is a pickle, which this toolkit does not open: convert it to {SINGLE} first, for"
            " example with AutoModel.from_pretrained(DIR).save_pretrained(DIR) of transformers"
        )
    raise UserError(f"{directory}: no {SINGLE} in it")


def _open_file(path: Path) -> dict[str, LazyArray]:
    def lazy(name: str, shape: Sequence[int]) -> LazyArray:
        def read(index: Index) -> np.ndarray:
            with _opened(path) as file:
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
        raise UserError(f"{path}: no such file, though {INDEX} names it") from error
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: truncated or not a safetensors file ({error})") from error


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Writes one safetensors file that torch and transformers read.

    The library's own function wants all tensors in memory; here each is read, written and forgotten.

    Args:
      path: the file.
      tensors: float32 arrays by name, on the host or at rest.

    Raises:
      UserError: it cannot be written (a full disk, say).
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
        raise UserError(f"{path.name} could not be written: {error.strerror or error}") from error


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
      UserError: it is missing or malformed.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except ValueError as error:  # malformed JSON, or not UTF-8
        raise UserError(f"{path}: not valid JSON ({error})") from error


def read_optional_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one where there is no such file.

    Raises:
      UserError: the file is malformed, or holds something else.
    """
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require(content: Any, key: str, path: Path) -> Any:
    """Returns content[key].

    Raises:
      UserError: `content`, read from `path`, is not an object or has no such key.
    """
    if not isinstance(content, dict) or key not in content:
        raise UserError(f"{path}: {key!r} is missing")
    return content[key]
