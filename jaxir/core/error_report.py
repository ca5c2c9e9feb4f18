"""Turns any error into one sentence and an exit status; writes unexpected tracebacks to files."""

from __future__ import annotations

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

from jaxir.core.errors import UsageError, UserError, causes
from jaxir.core.installation import PACKAGE, cache_directory
from jaxir.core.platforms import missing_device

INTERNAL = 70  # exit status EX_SOFTWARE of sysexits.h
KEPT = 20  # number of tracebacks in the user's cache; older ones are removed
OF_OUTPUTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # numbers of failed writes, whose OSError has no path


class Fault(NamedTuple):
    """The message that a command prints about an error (without "error: ") and its exit status."""

    sentence: str
    status: int


def explain(error: BaseException) -> Fault:
    """Returns what to print about an error; writes the traceback of an unexpected one to a file."""
    if isinstance(error, UserError):
        return Fault(_printable(str(error)), 2 if isinstance(error, UsageError) else 1)
    if isinstance(error, OSError):
        return Fault(_of_system(error), 1)
    # Only `Path.resolve` of Python 3.11 and 3.12 raises no OSError for a loop of links.
    if isinstance(error, RuntimeError) and (loop := re.fullmatch("Symlink loop from '(.*)'", str(error))):
        return Fault(_of_system(OSError(errno.ELOOP, os.strerror(errno.ELOOP), loop[1])), 1)
    # The text has a file name that os.fsdecode made of bytes which are not UTF-8.
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        text = error.object if len(error.object) <= 80 else f"...{error.object[error.start :]:.80}"
        return Fault(
            f"{text!r} contains a byte that is not UTF-8, so it cannot be written: rename the file", 1
        )
    if (sentence := missing_device(error)) is not None:
        return Fault(_printable(sentence), 1)
    if isinstance(error, MemoryError) or _is_of_device_memory(error):
        reason = f" ({_one_line(error):.160})" if str(error) else ""
        return Fault(f"there is not enough memory{reason}; {_kept(error)}", 1)
    text = _one_line(error)
    text = text if len(text) <= 800 else f"{text[:800]}..."
    place, status = blame(error)
    return Fault(f"{place}: {type(error).__name__}: {text}; {_kept(error)}", status)


def blame(error: BaseException) -> tuple[str, int]:
    """Returns the innermost line of the user's own code that an error passed, and the exit status.

    The user's code, such as an objective that a gin file names, is neither jaxir's nor installed. If the
    error passed no such code, the returned line is "internal".
    """
    lines = [
        f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
        for cause in causes(error)  # the innermost cause comes last
        for frame, line in traceback.walk_tb(cause.__traceback__)
        if _is_users(frame.f_code.co_filename)
    ]
    return (lines[-1], 1) if lines else ("internal", INTERNAL)


def _is_of_device_memory(error: BaseException) -> bool:
    """Whether XLA could not allocate an array; on a CPU its error does not contain RESOURCE_EXHAUSTED."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory allocating")
    return type(error).__name__ == "JaxRuntimeError" and any(w in str(error) for w in words)


def _is_users(filename: str) -> bool:
    import sysconfig  # imported here because it is slow and seldom needed

    others = (PACKAGE, *sysconfig.get_paths().values(), *site.getsitepackages())
    path = Path(filename)
    return path.is_absolute() and not any(path.is_relative_to(place) for place in others)


def _of_system(error: OSError) -> str:
    """Returns a message with the paths and the reason of a system error."""
    places = [
        os.fsdecode(p) for p in (error.filename, error.filename2) if isinstance(p, str | bytes | os.PathLike)
    ]
    why = error.strerror or _one_line(error) or type(error).__name__
    why = why[:1].lower() + why[1:]
    if places:
        return f"{' -> '.join(map(_path, places))}: {why}"
    if error.errno in OF_OUTPUTS:
        return f"the output could not be written: {why}"
    return f"{why} ({type(error).__name__}; {_kept(error)})"


def _path(path: str) -> str:
    return path if len(path) <= 200 and path.isprintable() else f"{path[:200]!r}"


def _printable(sentence: str) -> str:
    """Returns a sentence on one line; unprintable characters, such as in file names, are escaped."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in sentence)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _kept(error: BaseException) -> str:
    """Writes a traceback to the user's cache, else to the temporary directory; returns where it is."""
    text = "".join(traceback.format_exception(error))
    for place in (lambda: cache_directory() / "tracebacks", lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):  # `gettempdir` raises an OSError if no directory is writable
            directory = place()
            directory.mkdir(parents=True, exist_ok=True)
            moment = time.strftime("%Y%m%d-%H%M%S")
            descriptor, name = tempfile.mkstemp(".txt", f"jaxir-{moment}-", directory)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            for old in sorted((cache_directory() / "tracebacks").glob("*.txt"))[:-KEPT]:
                old.unlink(missing_ok=True)
            return f"the traceback is in {name}"
    return f"the traceback could not be written to a file:\n{text}"
