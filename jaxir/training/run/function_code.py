"""A hash of a function's code, which is the same in every process, to find out if the function changed."""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import platform
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PLAIN = str | int | float | complex | bytes | bool | None


def is_installed(function: types.FunctionType) -> bool:
    """Returns whether a function is jaxir's, Python's or an installed package's."""
    jaxirs = str(function.__module__).partition(".")[0] == "jaxir"
    return jaxirs or _is_in_package(function.__code__.co_filename)


def is_installed_class(cls: type) -> bool:
    """Returns whether a class is jaxir's, Python's or an installed package's."""
    name = str(cls.__module__)
    if name.partition(".")[0] in ("jaxir", "builtins"):
        return True
    module = sys.modules.get(name)
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return name != "__main__" if file is None else _is_in_package(file)


def _is_in_package(file: str) -> bool:
    return any(Path(file).is_relative_to(place) for place in _places())


@functools.cache
def _places() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple({Path(paths[name]) for name in ("stdlib", "purelib", "platlib")})


def innermost(function: Any) -> Any:
    """Returns the function inside installed wrappers (gin's, JAX's), not inside a user's own."""

    def stop(found: Any) -> bool:
        return isinstance(found, types.FunctionType) and not is_installed(found)

    return inspect.unwrap(function, stop=stop)


def enclosed(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values in a function's closure, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # nothing has been assigned to the variable yet
            continue
    return found


def code_of(function: types.FunctionType, text: Callable[[Any], str]) -> str:
    """Returns the minor version of Python and a hash of a function's code.

    The hash covers bytecode (so comments, layout and patch versions of Python make no difference), constants,
    and the plain values and functions among the globals that the code names. `text` must return the same text
    for equal values.
    """
    codes = list(_codes(function.__code__))
    docstrings = [function.__doc__, *[None] * len(codes[1:])]
    lines = [text(_plain(code, docstring)) for code, docstring in zip(codes, docstrings, strict=True)]
    reads = (i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for name in sorted({*reads} & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, PLAIN | tuple) or isinstance(innermost(value), types.FunctionType):
            lines.append(f"{name}={text(value)}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{'.'.join(platform.python_version_tuple()[:2])} {digest[:16]}"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and the code objects of functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _plain(code: types.CodeType, docstring: str | None) -> tuple[Any, ...]:
    """Returns all that determines a code object's behaviour, without its docstring and inner functions."""
    constants = tuple(None if isinstance(x, types.CodeType) else x for x in code.co_consts)
    if docstring is not None and constants[:1] == (docstring,):
        constants = (None, *constants[1:])
    flags = code.co_flags & 0xFF  # without the bits about docstrings and imports
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_exceptiontable, constants, counts, names
