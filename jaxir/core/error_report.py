"""Any error as one sentence and an exit status; a traceback, which is no user's affair, goes into a file."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import re
import site
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UsageError, UserError
from jaxir.core.installation import PACKAGE, cache_directory
from jaxir.core.platforms import missing_device

INTERNAL = 70  # EX_SOFTWARE of sysexits.h
KEPT = 20  # tracebacks
OF_OUTPUTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # writing fails without saying where


class Fault(NamedTuple):
    """What a command says of an error (without "error: ") and its exit status."""

    sentence: str
    status: int


def explain(error: BaseException) -> Fault:
    """Returns what to say of an error; of one that is nobody's mistake it writes the traceback to a file.

    The file is in the user's cache directory, else in the system's temporary one.
    """
    if isinstance(error, UserError):
        return Fault(_printable(str(error)), 2 if isinstance(error, UsageError) else 1)
    if isinstance(error, OSError):
        return Fault(_of_system(error), 1)
    if isinstance(error, ValueError) and str(error) == "embedded null byte":  # so Python says of a path
        return Fault("a path has a zero byte in it, which no file's name can have", 1)
    # `Path.resolve` of Python 3.11 and 3.12 raises this where every other function raises an OSError.
    if isinstance(error, RuntimeError) and (loop := re.fullmatch("Symlink loop from (.*)", str(error), re.S)):
        path = ast.literal_eval(loop[1])
        return Fault(_of_system(OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)), 1)
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":  # of os.fsdecode
        text = error.object if len(error.object) <= 80 else f"...{error.object[error.start :]:.80}"
        return Fault(f"{text!r} has a byte in it that is no UTF-8, and cannot be written into a file", 1)
    if (sentence := missing_device(error)) is not None:
        return Fault(_printable(sentence), 1)
    if isinstance(error, MemoryError) or _is_of_device_memory(error):
        return Fault(f"there is not enough memory{_reason(error)}; {_kept(error)}", 1)
    text = " ".join(str(error).split())
    text = text if len(text) <= 800 else f"{text[:800]}..."
    whose, status = blame(error)
    return Fault(f"{whose}: {type(error).__name__}: {text}; {_kept(error)}", status)


def blame(error: BaseException) -> tuple[str, int]:
    """Returns whose fault an error seems to be, and the exit status.

    That is the innermost line of code that is neither jaxir's nor installed: of an objective, say, that a gin
    file names. Without one the fault is "internal".
    """
    lines: list[str] = []
    while error is not None:  # what was raised first is seen last
        lines += [
            f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if _is_users(frame.f_code.co_filename)
        ]
        error = error.__cause__
    return (lines[-1], 1) if lines else ("internal", INTERNAL)


def _is_of_device_memory(error: BaseException) -> bool:
    """Whether XLA could not allocate an array: on a CPU it does not say RESOURCE_EXHAUSTED."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory allocating")
    return type(error).__name__ == "JaxRuntimeError" and any(w in str(error) for w in words)


def _is_users(filename: str) -> bool:
    import sysconfig  # slow, and seldom asked

    # Ours, the standard library and what is installed.
    others = (PACKAGE, *sysconfig.get_paths().values(), *site.getsitepackages())
    path = Path(filename)
    return path.is_absolute() and not any(path.is_relative_to(place) for place in others)


def _of_system(error: OSError) -> str:
    """Returns a sentence with the paths that the system could not do something with, and why."""
    places = [
        os.fsdecode(p) for p in (error.filename, error.filename2) if isinstance(p, str | bytes | os.PathLike)
    ]
    why = error.strerror or " ".join(str(error).split()) or type(error).__name__
    why = why[:1].lower() + why[1:]
    if places:
        return f"{' -> '.join(map(_one_line, places))}: {why}"
    if error.errno in OF_OUTPUTS:
        return f"output: {why}"
    return f"{why} ({type(error).__name__}; {_kept(error)})"


def _one_line(path: str) -> str:
    return path if len(path) <= 200 and path.isprintable() else f"{path[:200]!r}"


def _printable(sentence: str) -> str:
    """Returns it on one line, whatever signs the names in it have."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in sentence)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f" ({text:.160})" if text else ""


def _kept(error: BaseException) -> str:
    """Writes a traceback to a file; returns where it is."""
    text = "".join(traceback.format_exception(error))
    for directory in (cache_directory() / "tracebacks", Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            moment = time.strftime("%Y%m%d-%H%M%S")
            descriptor, name = tempfile.mkstemp(".txt", f"jaxir-{moment}-", directory)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            _remove_oldest(cache_directory() / "tracebacks")
            return f"the traceback is in {name}"
    return f"the traceback could not be written to a file:\n{text}"


def _remove_oldest(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for old in sorted(directory.glob("*.txt"))[:-KEPT]:
            old.unlink(missing_ok=True)
