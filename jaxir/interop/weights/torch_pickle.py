"""The pickle of a torch state dict, read without `pickle`: nothing that a file names is looked up or run.

A pickle is a program for a small stack machine, and its calls may name any function. The machine here knows
the instructions that a state dict needs. A name is only a word to it, and the few words that it knows stand
for what is said here: every other one is an error.
"""

import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxir.core.errors import UserError

_DTYPES = {
    "torch.FloatStorage": np.dtype(np.float32),
    "torch.HalfStorage": np.dtype(np.float16),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.DoubleStorage": np.dtype(np.float64),
    "torch.LongStorage": np.dtype(np.int64),
    "torch.IntStorage": np.dtype(np.int32),
    "torch.ShortStorage": np.dtype(np.int16),
    "torch.CharStorage": np.dtype(np.int8),
    "torch.ByteStorage": np.dtype(np.uint8),
    "torch.BoolStorage": np.dtype(np.bool_),
}
_INT64 = range(-(2**63), 2**63)
_MAX_DIMENSIONS = 64  # numpy's
# A tensor may repeat its numbers (stride 0), but not so that a small file fills the memory.
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


class _Name(NamedTuple):
    """A name of a function or class that is known; no more than the word."""

    name: str


class _Damaged(Exception):
    """What stands there is no state dict; the message says where it shows."""


def parse(content: bytes, path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state dict by name.

    Args:
      content: the pickle.
      path: the file that it was found in, for messages.

    Raises:
      UserError: it names what a state dict has no use for, is damaged, or holds something else.
    """
    machine = _Machine(path)
    try:
        found = machine.run(content)
    except (_Damaged, ValueError, LookupError, OverflowError, MemoryError) as error:
        raise UserError(f"{path}: its list of tensors is damaged ({error!s:.100})") from error
    return _tensors(found, path)


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
                f" {inner!r:.80} to a file of its own"
            )
        raise UserError(f"{path}: {name!r:.80} is not a tensor with a name, but {_kind(value)}")
    return found


def _kind(value: Any) -> str:
    return "one tensor" if isinstance(value, Tensor) else f"something else ({type(value).__name__})"


class _Machine:
    """Runs the instructions of a pickle; all that it can make are dicts, lists, tuples, words and tensors."""

    def __init__(self, path: Path):
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """Returns what the pickle leaves."""
        for instruction, argument, _ in pickletools.genops(content):
            if instruction.name == "STOP":
                break
            self._step(instruction.name, argument)
        return self._stack.pop()

    def _step(self, instruction: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        match instruction:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[instruction]())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[instruction])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4":
                if argument not in _INT64:
                    raise _Damaged("a number beyond 64 bits")
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                if not argument.isprintable():  # nor could a sentence that names it be printed
                    raise _Damaged("a text that cannot be printed")
                stack.append(argument)
            case "BINFLOAT":
                stack.append(argument)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple([stack.pop() for _ in range(int(instruction[-1]))][::-1]))
            case "TUPLE":
                stack.append(tuple(self._marked()))
            case "APPEND":
                self._top(-2, list).append(stack.pop())
            case "APPENDS":
                values = self._marked()
                self._top(-1, list).extend(values)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set([key, value])
            case "SETITEMS":
                self._set(self._marked())
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                if argument not in memo:
                    raise _Damaged(f"a value {argument} that was never kept")
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(self._known(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                if not isinstance(module, str) or not isinstance(name, str):
                    raise _Damaged("a name that is no text")
                stack.append(self._known(f"{module}.{name}"))
            case "INST":
                raise self._refusal(argument.replace(" ", ".", 1))
            case "REDUCE":
                arguments, name = stack.pop(), stack.pop()
                call = _CALLS.get(name.name) if isinstance(name, _Name) else None
                if call is None or not isinstance(arguments, tuple):
                    raise _Damaged("a call of what is no function")
                stack.append(call(*_arguments(call, arguments)))
            case "BUILD":
                # A state dict has one attribute, _metadata: versions of modules, which nothing here needs.
                state = stack.pop()
                self._top(-1, dict)
                if not isinstance(state, dict):
                    raise _Damaged("attributes that are none")
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case _:
                raise UserError(
                    f"{self._path}: its pickle uses the instruction {instruction}, which weights do not need;"
                    " nothing of it was run"
                )

    def _marked(self) -> list[Any]:
        """Takes what lies above the last mark."""
        start = self._marks.pop()
        if start > len(self._stack):
            raise _Damaged("a mark above the stack")
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _top(self, position: int, kind: type) -> Any:
        if not isinstance(self._stack[position], kind):
            raise _Damaged(f"no {kind.__name__} where one is filled")
        return self._stack[position]

    def _set(self, items: list[Any]) -> None:
        target = self._top(-1, dict)
        if len(items) % 2 or not all(isinstance(key, str | int) for key in items[::2]):
            raise _Damaged("a key that is no text")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _known(self, name: str) -> _Name:
        if name not in _CALLS and name not in _DTYPES:
            raise self._refusal(name)
        return _Name(name)

    def _refusal(self, name: str) -> UserError:
        said = ascii(name)[1:-1]  # it may hold what changes a terminal
        return UserError(
            f"{self._path}: opening it with torch would run {said:.100}, which weights in float32,"
            " float16 or bfloat16 do not need; nothing of it was run"
        )


def _arguments(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    least, most = _COUNTS[call]
    if not least <= len(arguments) <= most:
        raise _Damaged(f"a call with {len(arguments)} arguments")
    return arguments


def _storage(found: Any) -> Storage:
    match found:
        case ("storage", _Name(name), str(key), str(), int(count)) if name in _DTYPES and count >= 0:
            return Storage(key, _DTYPES[name], count)
    raise _Damaged("a storage that is none")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    """Stands for torch._utils._rebuild_tensor_v2; the rest is requires_grad, hooks and metadata."""
    metadata = rest[2] if len(rest) > 2 else None
    if not isinstance(storage, Storage) or metadata:
        raise _Damaged("a tensor without a storage, or with metadata")
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)):
        raise _Damaged("a tensor without a shape")
    if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)):
        raise _Damaged("a tensor with an impossible shape")
    size = 1
    for n in shape:
        size *= n
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if size and last >= storage.count:
        raise _Damaged("a tensor that reaches beyond its storage")
    if size > max(storage.count, _MAX_REPEATED):
        raise _Damaged(f"a tensor that repeats {storage.count} numbers without end")
    return Tensor(storage, offset, shape, strides)


def _parameter(tensor: Any, *rest: Any) -> Tensor:
    """Stands for torch._utils._rebuild_parameter; the rest is requires_grad, hooks and state."""
    if not isinstance(tensor, Tensor):
        raise _Damaged("a parameter without a tensor")
    return tensor


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": dict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
# How few and how many arguments each takes.
_COUNTS = {dict: (0, 0), _tensor: (4, 7), _parameter: (1, 4)}
