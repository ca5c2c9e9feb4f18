"""Reads the pickle of a torch state dict by an `Unpickler` that knows only harmless stand-ins."""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxir.core.errors import UserError

# A tensor with stride 0 repeats its storage, so it may be larger. This maximum keeps a small file from
# filling the memory.
_MAX_REPEATED = 1 << 24


class Storage(NamedTuple):
    """Numbers in a file, shared by tensors: the archive's member `key` has `count` numbers."""

    key: str
    dtype: np.dtype
    count: int


class Tensor(NamedTuple):
    """A view within the bounds of a storage; offset and strides count numbers, not bytes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Type(NamedTuple):
    """Stands for a class of torch's storages. A tuple, because a pickle cannot change tuples."""

    dtype: np.dtype


class _Function(NamedTuple):
    """Stands for a function that a pickle may call."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class _StateDict(dict):
    """Stands for an OrderedDict. Its attribute, the versions of modules, is ignored."""

    def __setstate__(self, state: Any) -> None:
        pass


def parse(content: bytes, path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state dict by name; `path` is for error messages."""
    try:
        for instruction, argument, _ in pickletools.genops(content):
            # pickle reserves memory for N values if a value is stored under the number N.
            if instruction.name == "LONG_BINPUT" and argument > len(content):
                raise ValueError(f"a value has number {argument}, but there are {len(content)} bytes")
        found = _Unpickler(content, path).load()
    except UserError:
        raise
    except Exception as error:  # pickle raises many types of errors for damaged files
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: its list of tensors is damaged ({reason:.100}); copy it again") from error
    return _tensors(found, path)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path):
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _NAMES:
            return _NAMES[full]
        raise UserError(
            f"{self._path}: opening it with torch would run {ascii(full)[1:-1]:.100}, which weights in"
            " float32, float16 or bfloat16 do not need; nothing in it was run; use a safetensors file"
        )

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            case ("storage", _Type(dtype), str(key), str(), int(count)) if count >= 0:
                return Storage(key, dtype, count)
        raise ValueError("not a storage")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    """Stands for torch._utils._rebuild_tensor_v2; `rest` is requires_grad, hooks and metadata."""
    if not isinstance(storage, Storage) or any(rest[2:]):
        raise ValueError("a tensor without a storage, or with metadata")
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)):
        raise ValueError("a tensor without a shape")
    if any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)):
        raise ValueError("a tensor with an impossible shape")
    size = math.prod(shape)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if size and last >= storage.count:
        raise ValueError("a tensor that reaches beyond its storage")
    if size > max(storage.count, _MAX_REPEATED):
        raise ValueError(f"a tensor that is far larger than its {storage.count} stored numbers")
    return Tensor(storage, offset, shape, strides)


def _parameter(tensor: Tensor, *rest: Any) -> Tensor:
    """Stands for torch._utils._rebuild_parameter; `rest` is requires_grad, hooks and state."""
    return tensor


_DTYPES = {
    "Float": np.float32,
    "Half": np.float16,
    "BFloat16": ml_dtypes.bfloat16,
    "Double": np.float64,
    "Long": np.int64,
    "Int": np.int32,
    "Short": np.int16,
    "Char": np.int8,
    "Byte": np.uint8,
    "Bool": np.bool_,
}
_NAMES = {
    "collections.OrderedDict": _Function(_StateDict),
    "torch._utils._rebuild_tensor_v2": _Function(_tensor),
    "torch._utils._rebuild_parameter": _Function(_parameter),
    "torch._utils._rebuild_parameter_with_state": _Function(_parameter),
    **{f"torch.{name}Storage": _Type(np.dtype(dtype)) for name, dtype in _DTYPES.items()},
}


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(found, dict):
        raise UserError(
            f"{path}: expected tensors by name (a state dict), found {_kind(found)}; save a state dict"
        )
    for name, value in found.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            continue
        inner = next((n for n, v in found.items() if isinstance(v, dict) and v), None)
        if inner is not None:
            raise UserError(
                f"{path}: this is a training checkpoint, not only weights: in torch, save its entry"
                f" {inner!r:.80} to a separate file"
            )
        raise UserError(
            f"{path}: {name!r:.80} must be a named tensor, but is {_kind(value)}; save only tensors"
        )
    return found


def _kind(value: Any) -> str:
    return "one tensor" if isinstance(value, Tensor) else f"an object of type {type(value).__name__}"
