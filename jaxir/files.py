"""Output files and directories that appear only when whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jaxir.errors import UserError


@contextlib.contextmanager
def atomic_file(path: str | Path, mode: str = "w", **kwargs: Any) -> Iterator[IO[Any]]:
    """Opens a file beside `path` for writing; renames it to `path` on success, removes it on any error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if "b" not in mode:
        kwargs.setdefault("encoding", "utf-8")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, mode, **kwargs) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_directory(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory beside `path`; renames it to `path` on success, removes it on any error.

    Raises:
      UserError: `path` exists, is not an empty directory, and `overwrite` is false.
    """
    path = Path(path)
    if path.exists() and not overwrite and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} already exists; give another output or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield aside
        aside.chmod(0o777 & ~_umask())
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
            path.replace(old / path.name)
            aside.replace(path)
            shutil.rmtree(old)
        else:
            aside.replace(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
