"""The pickle of a torch state dict, read by an `Unpickler` that knows a few names and runs nothing else.

A pickle is a program for a small stack machine. Its instructions are looked through first: they must be among
those that a state dict needs, and may not name other functions, nest deeply or ask for much memory.
"""

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

_INSTRUCTIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "BINPERSID"),
)
_DEEPEST = 1000  # Python's own recursion over nested tuples is not limited and may exceed the C stack
_MAX_DIMENSIONS = 64  # numpy's
# A tensor may repeat its numbers (stride 0), but a small file may not fill the memory.
_MAX_REPEATED = 1 << 24


class Storage(NamedTuple):
    """Numbers in a file that tensors share.

    Attributes:
      key: the name of the member of the archive that holds them.
      dtype: their type.
      count: how many there are.
    """

    key: str
    dtype: np.dtype
    count: int


class Tensor(NamedTuple):
    """A view of a storage, none of it outside.

    Attributes:
      storage: what it views.
      offset: numbers before its first element.
      shape: its shape.
      strides: numbers from one element to the next along each dimension.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Type(NamedTuple):
    """Stands for a class of torch's storages. An instruction cannot change a tuple."""

    dtype: np.dtype


class _Function(NamedTuple):
    """Stands for a function that a pickle may call."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class _StateDict(dict):
    """Stands for an OrderedDict, without its one attribute: the versions of modules."""

    def __setstate__(self, state: Any) -> None:
        pass


def parse(content: bytes, path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state dict by name.

    Args:
      content: the pickle.
      path: the file that holds it, for messages.

    Raises:
      UserError: it names what a state dict has no use for, is damaged, or holds something else.
    """
    try:
        _check(content, path)
        found = _Unpickler(content, path).load()
    except UserError:
        raise
    except Exception as error:  # of pickle, pickletools, Unicode, ...: all mean the same here
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: its list of tensors is damaged ({reason:.100})") from error
    return _tensors(found, path)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path):
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        return _known(f"{module}.{name}", self._path)

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            case ("storage", _Type(dtype), str(key), str(), int(count)) if count >= 0:
                return Storage(key, dtype, count)
        raise ValueError("a storage that is none")


def _check(content: bytes, path: Path) -> None:
    """Looks through the instructions of a pickle; `depths` has the nesting of what would be on its stack."""
    depths: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for instruction, argument, _ in pickletools.genops(content):
        name, takes = instruction.name, instruction.stack_before
        if name in ("GLOBAL", "INST"):
            _known(argument.replace(" ", ".", 1), path)
        if name not in _INSTRUCTIONS:
            raise UserError(
                f"{path}: its pickle uses the instruction {name}, which weights do not need; nothing of it"
                " was run"
            )
        if "UNICODE" in name and not argument.isprintable():  # nor could a sentence that names it be printed
            raise ValueError("a text that cannot be printed")
        if isinstance(argument, int) and argument.bit_length() > 64:
            raise ValueError("a number beyond 64 bits")
        if name == "MARK":
            marks.append(len(depths))
            continue
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            at = len(memo) if name == "MEMOIZE" else argument
            if at > len(content):  # Python would reserve memory for all before it
                raise ValueError(f"a value is kept as number {at}")
            memo[at] = depths[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            depths.append(memo[argument])
        else:
            taken = len(takes)
            if pickletools.markobject in takes:
                start = marks.pop()
                taken = len(depths) - start + takes.index(pickletools.markobject)
            deepest = 1 + max(depths[len(depths) - taken :], default=0) if taken else 0
            if taken > len(depths) or deepest > _DEEPEST:
                raise ValueError("its values are nested too deeply, or missing")
            del depths[len(depths) - taken :]
            depths += [deepest] * len(instruction.stack_after)


def _known(name: str, path: Path) -> Any:
    if name in _NAMES:
        return _NAMES[name]
    raise UserError(
        f"{path}: opening it with torch would run {ascii(name)[1:-1]:.100}, which weights in float32, float16"
        " or bfloat16 do not need; nothing of it was run"
    )


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    """Stands for torch._utils._rebuild_tensor_v2; the rest is requires_grad, hooks and metadata."""
    if not isinstance(storage, Storage) or any(rest[2:]):
        raise ValueError("a tensor without a storage, or with metadata")
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)):
        raise ValueError("a tensor without a shape")
    if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)):
        raise ValueError("a tensor with an impossible shape")
    size = math.prod(shape)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if size and last >= storage.count:
        raise ValueError("a tensor that reaches beyond its storage")
    if size > max(storage.count, _MAX_REPEATED):
        raise ValueError(f"a tensor that repeats {storage.count} numbers without end")
    return Tensor(storage, offset, shape, strides)


def _parameter(tensor: Tensor, *rest: Any) -> Tensor:
    """Stands for torch._utils._rebuild_parameter; the rest is requires_grad, hooks and state."""
    return tensor


_NAMES = {
    "collections.OrderedDict": _Function(_StateDict),
    "torch._utils._rebuild_tensor_v2": _Function(_tensor),
    "torch._utils._rebuild_parameter": _Function(_parameter),
    "torch._utils._rebuild_parameter_with_state": _Function(_parameter),
    "torch.FloatStorage": _Type(np.dtype(np.float32)),
    "torch.HalfStorage": _Type(np.dtype(np.float16)),
    "torch.BFloat16Storage": _Type(np.dtype(ml_dtypes.bfloat16)),
    "torch.DoubleStorage": _Type(np.dtype(np.float64)),
    "torch.LongStorage": _Type(np.dtype(np.int64)),
    "torch.IntStorage": _Type(np.dtype(np.int32)),
    "torch.ShortStorage": _Type(np.dtype(np.int16)),
    "torch.CharStorage": _Type(np.dtype(np.int8)),
    "torch.ByteStorage": _Type(np.dtype(np.uint8)),
    "torch.BoolStorage": _Type(np.dtype(np.bool_)),
}


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(found, dict):
        raise UserError(f"{path}: it holds no tensors by name (a state dict), but {_kind(found)}")
    for name, value in found.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            continue
        inner = next((n for n, v in found.items() if isinstance(v, dict) and v), None)
        if inner is not None:
            raise UserError(
                f"{path}: it is a training checkpoint, not weights alone: in torch, save what stands under"
                f" {_named(inner)} to a file of its own"
            )
        raise UserError(f"{path}: {_named(name)} is not a tensor with a name, but {_kind(value)}")
    return found


def _named(key: Any) -> str:
    return f"{key!r:.80}" if isinstance(key, str | int) else f"a {type(key).__name__}"


def _kind(value: Any) -> str:
    return "one tensor" if isinstance(value, Tensor) else f"something else ({type(value).__name__})"
