"""Writes a state dict as torch.save does, for libraries that read no safetensors."""

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

# Opcodes of pickle's protocol 2.
_PROTO, _STOP, _MARK, _EMPTY_DICT, _SETITEMS = b"\x80\x02", b".", b"(", b"}", b"u"
_TUPLE, _EMPTY_TUPLE, _REDUCE, _PERSISTENT, _FALSE = b"t", b")", b"R", b"Q", b"\x89"


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes float32 arrays by name; torch.load(path, weights_only=True) returns them as tensors."""
    arrays = {name: np.ascontiguousarray(x, "<f4") for name, x in tensors.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{path.stem}/data.pkl", _pickled(arrays))
        archive.writestr(f"{path.stem}/byteorder", "little")
        for key, x in enumerate(arrays.values()):
            archive.writestr(f"{path.stem}/data/{key}", x.tobytes())
        archive.writestr(f"{path.stem}/version", "3\n")


def _pickled(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns the pickle of a dict of tensors, whose numbers are the files `data/KEY` of the archive."""
    items = [_text(name) + _tensor(key, x) for key, (name, x) in enumerate(arrays.items())]
    return _PROTO + _EMPTY_DICT + _MARK + b"".join(items) + _SETITEMS + _STOP


def _tensor(key: int, x: np.ndarray) -> bytes:
    """Returns the call that makes the tensor [...] of a storage."""
    storage = [
        _text("storage"),
        _global("torch", "FloatStorage"),
        _text(str(key)),
        _text("cpu"),
        _int(x.size),
    ]
    strides = [step // x.itemsize for step in x.strides]
    no_hooks = _global("collections", "OrderedDict") + _EMPTY_TUPLE + _REDUCE
    shape = [_tuple(map(_int, x.shape)), _tuple(map(_int, strides))]
    arguments = [_tuple(storage) + _PERSISTENT, _int(0), *shape, _FALSE, no_hooks]
    return _global("torch._utils", "_rebuild_tensor_v2") + _tuple(arguments) + _REDUCE


def _tuple(parts: Iterable[bytes]) -> bytes:
    return _MARK + b"".join(parts) + _TUPLE


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    content = text.encode()
    return b"X" + len(content).to_bytes(4, "little") + content


def _int(number: int) -> bytes:
    return b"J" + number.to_bytes(4, "little", signed=True)
