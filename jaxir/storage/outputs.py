"""What a command writes, looked at before it works: see `writes`."""

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
    check_unicode,
    is_bucket,
    local_path,
    path_of,
    status_of,
)
from jaxir.storage.locks import writing
from jaxir.storage.open_files import open_to_read
from jaxir.storage.temporary_outputs import is_temporary

# A file of ranked answers or a report replaces one of its kind; a directory must be new, unless it is to be
# changed, or was begun by the same command. Models and training runs may be in a bucket too; who writes them
# looks at that. Several processes together may write a shared file: the one that does holds it.
Kind = Literal[
    *("run file", "shared run file", "report", "shared outputs file"),
    *("directory", "changed directory", "model", "run"),
    *("embeddings directory", "grid", "rounds directory", "quickstart directory"),
]
FILES = ("run file", "shared run file", "report", "shared outputs file")
WHOLE = ("run file", "report", "directory", "model")  # held meanwhile; who works in the others holds them
# Directories that are worked in, and taken up again, and what they have from the beginning: one of these.
BEGUN = {
    "embeddings directory": {"embeddings.json"},
    "grid": {"cells"},
    "rounds directory": {"commands.txt", "round0"},
    "quickstart directory": {"pydocs"},
}
# Keys in the JSON of a file, one of which it has.
_KEYS = {"report": {"per_query", "systems", "spearman"}, "file of outputs": {"outputs"}}


def writes(*, unless: str | None = None, **kinds: Kind) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has a command look at all its outputs before it works, whether flags, gin or Python name them.

    What appears when whole is held against other processes meanwhile.

    Args:
      unless: a parameter with which nothing is written, or the function looks and holds itself.
      **kinds: parameters that name outputs, and what each is; None is looked at nowhere.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(*args, **kwargs)  # what is missing, the function says
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
                                check_output(f"--{name}", path, kind)  # who held it has written it
                return function(*args, **kwargs)

        checked.__signature__ = signature  # gin asks for it
        checked.outputs = kinds
        return checked

    return decorate


def alone(path: str | Path) -> contextlib.AbstractContextManager[None]:
    """Holds an output against other processes until it is written; nothing in a bucket.

    Raises:
      UserError: another process is writing it.
    """
    return contextlib.nullcontext() if is_bucket(path) else writing(path_of(path))


def check_output(what: str, path: str | Path, kind: Kind) -> None:
    """Checks that an output can be written; changes nothing.

    Raises:
      UserError: it cannot. The sentence begins with `what` where `path` is empty, else with `path`.
    """
    check_named(what, path)
    if kind in FILES:
        place = path_of(path)
        if place.name.endswith(".gz"):
            raise UserError(f"{path}: outputs are not compressed: leave out .gz")
        if is_bucket(place):
            check_bucket(place, writing=True)
        else:
            check_replaceable(place)
            check_room(place)
    elif kind == "directory":
        check_new_directory(path)
    elif kind in ("model", "run"):
        place = path_of(path)
        check_unicode(place)
        if not is_bucket(place):
            check_free(place) if kind == "model" else check_directory(place)
    elif kind == "changed directory":  # it is written anew beside itself
        place = local_path(path, "written to")
        status_of(place)
        check_room(place)
    else:
        check_work_directory(path, kind)


def check_named(what: str, path: str | Path) -> None:
    """Checks that an output has a name, and one that is meant.

    Raises:
      UserError: it has none, or a shell was to make another of it. The sentence begins as `check_output`'s.
    """
    if not str(path):
        raise UserError(f"{what} is empty")
    if str(path).startswith("~"):
        raise UserError(
            f"{path}: shells leave ~ as it is behind an =, and so would make a directory of that name"
        )


def check_not_read(path: str | Path, arguments: Mapping[str, Any]) -> None:
    """Checks that a file that will be replaced is not one that the command reads.

    Args:
      path: the file.
      arguments: the others of the command; those that are texts, or lists of them, may name files.

    Raises:
      UserError: it is.
    """
    place = path_of(path)
    if is_bucket(place) or not place.is_file():
        return
    for name, value in arguments.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            for text in re.split(r",|^\w+:|^\w+=", item) if isinstance(item, str) else ():
                with contextlib.suppress(OSError, ValueError):
                    if text and place.samefile(text):
                        raise UserError(f"{path} is what --{name} reads: give another output")


def check_not_foreign(path: str | Path, kind: Kind) -> None:
    """Checks that a file that will be replaced is empty or of the kind that takes its place.

    Raises:
      UserError: it is something else, which may be dear to someone.
    """
    place = path_of(path)
    if is_bucket(place) or not place.is_file() or not place.stat().st_size:
        return
    what = {"report": "report", "shared outputs file": "file of outputs"}.get(kind, "run file")
    if not _is_kind(place, what):
        raise UserError(f"{path} is there already and is no {what}: give another output, or remove it first")


def _is_kind(path: Path, what: str) -> bool:
    with open_to_read(path) as file, contextlib.suppress(ValueError, RecursionError):
        if what == "run file":
            fields = file.readline(10_000).split()
            return len(fields) == 6 and float(fields[4]) is not None
        content = json.loads(file.read() if what == "report" else file.readline(10_000_000))
        return isinstance(content, dict) and bool(_KEYS[what] & content.keys())
    return False


def check_work_directory(path: str | Path, kind: Kind) -> None:
    """Checks that a local directory can be worked in: it is missing, empty, or was begun as one of its kind.

    Raises:
      UserError: it is something else, or no file can be written into it.
    """
    check_directory(path)
    place = local_path(path, "written to")
    if place.is_dir():
        names = {entry.name for entry in place.iterdir() if not is_temporary(entry.name)}
        if names and not names & BEGUN[kind]:
            raise UserError(f"{path} already exists and is no {kind}; give another output")


def check_directory(path: str | Path) -> None:
    """Checks that files can be written into a local directory, which need not be there.

    Raises:
      UserError: something else is there, or no file can be written into it.
    """
    place = local_path(path, "written to")
    found = status_of(place)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{place} is no directory; give another output or remove it first")
    check_room(place if found is None else place / "file")
