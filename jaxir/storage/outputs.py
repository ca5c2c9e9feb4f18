"""Checks the outputs of a command before the command starts its work: see `writes`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxir.core.errors import UserError
from jaxir.storage.files import (
    check_bucket,
    check_free,
    check_new_directory,
    check_replaceable,
    check_room,
    is_bucket,
    local_path,
    path_of,
    status_of,
)
from jaxir.storage.locks import writing
from jaxir.storage.open_files import open_to_read
from jaxir.storage.temporary_outputs import is_temporary

# A file may replace a file of its kind. A directory must be new, unless the command changes it or started it
# earlier. Only models and runs may be in a bucket, and their writers check that. Several processes may
# compute a shared file together; the process that writes the file locks it.
Kind = Literal[
    *("run file", "shared run file", "report", "shared outputs file"),
    *("directory", "changed directory", "model", "run"),
    *("embeddings directory", "grid", "rounds directory", "quickstart directory", "MTEB directory"),
]
FILES = ("run file", "shared run file", "report", "shared outputs file")
WHOLE = ("run file", "report", "directory", "model")  # kinds that `writes` locks
# Kinds of directories that an interrupted command resumes -> entries. A started directory has one or more.
BEGUN = {
    "embeddings directory": {"embeddings.json"},
    "grid": {"cells"},
    "rounds directory": {"commands.txt", "round0"},
    "quickstart directory": {"pydocs"},
    "MTEB directory": {"results"},
}
_KEYS = {
    "report": {"per_query", "systems", "spearman", "forums", "collections"},
    "file of outputs": {"outputs"},
}  # a file of this kind is JSON with at least one of these keys


def writes(*, unless: str | None = None, **kinds: Kind) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a command check all its outputs before it starts, whether flags, gin or Python name them.

    Outputs of the kinds in `WHOLE` are locked until the command ends.

    Args:
      unless: a parameter; if it is set, nothing is checked or locked here, as the function does not need it.
      **kinds: the kind of each parameter that names an output; an output that is None is not checked.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(*args, **kwargs)  # The call below reports missing arguments.
            given.apply_defaults()
            with contextlib.ExitStack() as held:
                if unless is None or not given.arguments[unless]:
                    for name, kind in kinds.items():
                        if (path := given.arguments.get(name)) is not None:
                            check_output(f"--{name}", path, kind)
                            if kind in FILES:
                                others = {n: v for n, v in given.arguments.items() if n not in kinds}
                                check_not_read(path, others)
                                check_not_foreign(path, kind)
                            if kind in WHOLE:
                                held.enter_context(alone(path))
                return function(*args, **kwargs)

        checked.__signature__ = signature  # gin reads the parameters here
        checked.outputs = kinds
        return checked

    return decorate


def alone(path: str | Path) -> contextlib.AbstractContextManager[None]:
    """Locks an output against other processes; an output in a bucket is not locked."""
    return contextlib.nullcontext() if is_bucket(path) else writing(path_of(path))


def check_output(what: str, path: str | Path, kind: Kind) -> None:
    """Checks that an output can be written; changes nothing. `what` is its flag, for error messages."""
    check_named(what, path)
    if kind in FILES:
        place = path_of(path)
        if place.name.endswith(".gz"):
            raise UserError(f"{path}: outputs cannot be compressed: leave out .gz")
        if is_bucket(place):
            check_bucket(place, writing=True)
        else:
            check_replaceable(place)
            check_room(place)
    elif kind == "directory":
        check_new_directory(path)
    elif kind in ("model", "run"):
        if not is_bucket(place := path_of(path)):
            check_free(place) if kind == "model" else check_directory(place)
    elif kind == "changed directory":  # The new version is written beside the old one.
        place = local_path(path, "written to")
        status_of(place)
        check_room(place)
    else:
        check_work_directory(path, kind)


def check_named(what: str, path: str | Path) -> None:
    """Raises a UserError for an empty path, and for a path that starts with an unexpanded ~."""
    if not str(path):
        raise UserError(f"{what} is empty")
    if str(path).startswith("~"):
        raise UserError(
            f"{path}: shells do not expand ~ after =, so this would make a directory named ~; write $HOME"
        )


def check_not_read(path: str | Path, arguments: Mapping[str, Any]) -> None:
    """Raises a UserError if an output would replace a file that another argument names as input."""
    place = path_of(path)
    if is_bucket(place) or not place.is_file():
        return
    for name, value in arguments.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            for text in re.split(r",|^\w+:|^\w+=", item) if isinstance(item, str) else ():
                with contextlib.suppress(OSError, ValueError):
                    if text and place.samefile(text):
                        raise UserError(f"{path} is also the input of --{name}: give another output")


def check_not_foreign(path: str | Path, kind: Kind) -> None:
    """Raises a UserError if an output would replace a file that is neither empty nor of the output's kind."""
    place = path_of(path)
    if is_bucket(place) or not place.is_file() or not place.stat().st_size:
        return
    what = {"report": "report", "shared outputs file": "file of outputs"}.get(kind, "run file")
    if not _is_kind(place, what):
        raise UserError(f"{path} already exists and is not a {what}: give another output, or remove it first")


def _is_kind(path: Path, what: str) -> bool:
    with open_to_read(path) as file, contextlib.suppress(ValueError, RecursionError):
        if what == "run file":
            fields = file.readline(10_000).split()
            return len(fields) == 6 and float(fields[4]) is not None
        content = json.loads(file.read() if what == "report" else file.readline(10_000_000))
        return isinstance(content, dict) and bool(_KEYS[what] & content.keys())
    return False


def check_work_directory(path: str | Path, kind: Kind) -> None:
    """Checks that a local directory is missing, empty, or was started as this kind, and can be written."""
    check_directory(path)
    place = local_path(path, "written to")
    if place.is_dir():
        names = {entry.name for entry in place.iterdir() if not is_temporary(entry.name)}
        if names and not names & BEGUN[kind]:
            raise UserError(
                f"{path} already exists and is not what this command writes ({kind}); give another output"
            )


def check_directory(path: str | Path) -> None:
    """Checks that files can be written into a local directory, which may be missing."""
    place = local_path(path, "written to")
    found = status_of(place)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{place} is not a directory; give another output or remove it first")
    check_room(place if found is None else place / "file")
