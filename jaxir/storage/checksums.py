"""SHA256SUMS: what the files of a directory were when it was written, and a look whether they still are.

A directory that is written whole and memory-mapped later has one, in the format of coreutils, so that
`sha256sum -c SHA256SUMS` checks it too. Who opens such a directory checks all its files, once: a stamp in the
user's cache tells their sizes and times, and while these stay the same they are not read again. Files of
others that tell their own hashes (the hub's, torch's) are looked at in the same way.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxir.core.errors import UserError
from jaxir.core.installation import cache_directory
from jaxir.core.progress import progress
from jaxir.storage.files import atomic_directory, atomic_file, inside
from jaxir.storage.open_files import open_to_read, read_text

NAME = "SHA256SUMS"
MEND = f"copy it again, make it anew, or remove {NAME} if it was changed on purpose"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
# Files of less are read in a second or two; of more, a bar says how far it is.
TOLD_FROM = 2 << 30
# Two writes that come as near to each other may leave a file with the same times.
TICK_NS = 20_000_000


@contextlib.contextmanager
def directory_with_checksums(
    path: str | Path, *, overwrite: bool = False, without: Collection[str] = ()
) -> Iterator[Path]:
    """As `files.atomic_directory`, with a SHA256SUMS of all that is written.

    Args:
      path: where to.
      overwrite: whether what is there is replaced.
      without: files and directories in it that those who use it change.

    Raises:
      UserError: as `files.atomic_directory`.
    """
    with atomic_directory(path, overwrite=overwrite) as aside:
        yield aside
        keys = {name: key(aside / name) for name in _names(aside, without)}
        write(aside, _digests(aside, list(keys)))
    stamp(path, keys)


def check(directory: Path, *, without: Collection[str] = (), may_grow: bool = False) -> None:
    """Checks that a directory holds what was written; one without SHA256SUMS is taken as it is.

    A process that opens it again, this one or another, does not read its files again until one of them
    changes. What a disk loses meanwhile, without a change of the file's times, is not noticed.

    Args:
      directory: the directory.
      without: files and directories in it that are not listed.
      may_grow: whether there may be files besides those that were written. Hidden ones always may.

    Raises:
      UserError: a file has changed, is missing or has been added, or SHA256SUMS is damaged.
    """
    sums = read(directory)
    if sums is None:
        return
    keys = {name: key(directory / name) for name in sums}
    added = [] if may_grow else sorted(set(_names(directory, without)) - sums.keys())
    wrong = next((f"{name} is missing" for name, found in keys.items() if found is None), None)
    wrong = wrong or next((f"{name} was not there when it was written" for name in added), None)
    if wrong is None:
        if _stamped(directory) == _state(directory, keys):
            return
        found = _digests(directory, list(sums))
        wrong = next((f"{n} is not what was written" for n in sums if found[n] != sums[n]), None)
    if wrong is None:
        stamp(directory, keys)
    elif read(directory) != sums:  # another process has just put a new one there
        check(directory, without=without, may_grow=may_grow)
    else:
        raise UserError(f"{directory} is damaged: {wrong} ({NAME} says what was); {MEND}")


def read(directory: Path) -> dict[str, str] | None:
    """Returns the hash of each file as SHA256SUMS has it, by name; None where there is none.

    Raises:
      UserError: it is damaged, or names a file outside of the directory.
    """
    path = directory / NAME
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    sums = {}
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise UserError(f"{path}:{number}: {line!r:.40} is no line of such a file; {MEND}")
        inside(directory, found[2], said_by=path)
        sums[found[2]] = found[1]
    return sums


def write(directory: Path, sums: Mapping[str, str]) -> None:
    """Writes SHA256SUMS from the hash of each file, by name."""
    with atomic_file(directory / NAME) as file:
        file.writelines(_lines(sums))


def write_all(directory: Path, *, without: Collection[str] = ()) -> None:
    """Writes a SHA256SUMS of all files of a directory that is being written, but for those of `without`."""
    write(directory, _digests(directory, _names(directory, without)))


def take_up(directory: Path, names: Collection[str]) -> dict[str, str]:
    """Begins a SHA256SUMS that grows, or goes on with it where it was interrupted.

    Args:
      directory: where it is.
      names: the files that are there. Those of which no process has added a hash are read.

    Returns:
      Their hashes, which are what it holds now.
    """
    wanted, sums, of_others = set(names), {}, sorted(directory.glob(f".{NAME}.*"))
    for path in (directory / NAME, *of_others):
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for line in text.splitlines():
            if (found := _LINE.fullmatch(line)) and found[2] in wanted:
                sums[found[2]] = found[1]
    sums |= _digests(directory, [name for name in names if name not in sums])
    write(directory, sums)
    for path in of_others:
        path.unlink()
    return sums


def append(directory: Path, sums: Mapping[str, str], *, process: int = 0) -> None:
    """Adds hashes to a SHA256SUMS that grows.

    Args:
      directory: where it is.
      sums: the hash of each file, by name.
      process: of several that write into the directory together all but 0 have a hidden file of their own,
        which `take_up` adds.
    """
    with (directory / (f".{NAME}.{process}" if process else NAME)).open("a", encoding="utf-8") as file:
        file.writelines(_lines(sums))
        file.flush()
        os.fsync(file.fileno())


def stamp(directory: str | Path, keys: Mapping[str, Any]) -> None:
    """Notes in the user's cache that files are what SHA256SUMS says.

    Args:
      directory: where they are.
      keys: what `key` gave of each before it was read, or once it was written, by name.
    """
    directory = Path(directory)
    if _settled(keys.values()):
        with contextlib.suppress(OSError, UserError), atomic_file(_stamp_path(directory)) as file:
            file.write(_state(directory, keys))


def is_intact(path: Path, expected: str, digest: Callable[[Path], str]) -> bool:
    """Returns whether a file whose hash is known has it. As in `check`, an unchanged file is read once.

    Args:
      path: the file.
      expected: its hash, of whatever kind.
      digest: reads the file and returns that hash.
    """
    found = key(path)
    if _stamped(path) == f"{expected} {found}\n":
        return True
    if digest(path) != expected:
        return False
    stamp_file(path, expected, found)
    return True


def stamp_file(path: Path, expected: str, found: tuple[int, int, int, int] | None) -> None:
    """Notes for `is_intact` that a file has a hash.

    Args:
      path: the file.
      expected: its hash.
      found: what `key` gave of it before it was read, or once it was written.
    """
    if found is not None and _settled([found]):
        with contextlib.suppress(OSError, UserError), atomic_file(_stamp_path(path)) as file:
            file.write(f"{expected} {found}\n")


def key(path: Path) -> tuple[int, int, int, int] | None:
    """Returns what changes with a file: its size, its times and its inode; None where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class Hashed:
    """A binary file that is written, and the hash of what is written to it."""

    def __init__(self, file: IO[bytes]):
        self._file, self._digest = file, hashlib.sha256()

    def write(self, content: Any) -> int:
        self._digest.update(memoryview(content).cast("B"))
        return self._file.write(content)

    def hexdigest(self) -> str:
        """Returns the SHA-256 of all that was written, as text."""
        return self._digest.hexdigest()


def _settled(keys: Collection[tuple[int, int, int, int]]) -> bool:
    """Waits until files will show by their times that they change; returns whether they will."""
    newest = max((max(found[1:3]) for found in keys), default=0)
    time.sleep(min(max(newest + TICK_NS - time.time_ns(), 0), TICK_NS) / 1e9)
    return newest + TICK_NS <= time.time_ns()  # by another machine's clock it may not be


def _lines(sums: Mapping[str, str]) -> list[str]:
    return [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]


def _names(directory: Path, without: Collection[str]) -> list[str]:
    """Returns the paths of all files below a directory but hidden ones, SHA256SUMS and those of `without`."""
    found = []
    for place, folders, files in os.walk(directory):
        here = Path(place).relative_to(directory)
        kept = [f for f in folders if not f.startswith(".") and (here / f).as_posix() not in without]
        folders[:] = kept
        found += [(here / f).as_posix() for f in files if not f.startswith(".")]
    return sorted(set(found) - {NAME, *without})


def _digests(directory: Path, names: Collection[str]) -> dict[str, str]:
    """Returns the SHA-256 of files by name, each read once."""
    sizes = {name: (directory / name).stat().st_size for name in names}
    total, workers = sum(sizes.values()), min(4, os.cpu_count() or 1)
    hidden = total < TOLD_FROM
    with (
        progress(total=total, what=f"checking {directory}", unit="B", hidden=hidden) as bar,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):

        def digest(name: str) -> str:
            found = hashlib.sha256()
            with open_to_read(directory / name) as file:
                while piece := file.read(1 << 20):
                    found.update(piece)
                    bar.update(len(piece))
            return found.hexdigest()

        return dict(zip(names, pool.map(digest, names), strict=True))


def _state(directory: Path, keys: Mapping[str, Any]) -> str:
    told = [(directory / NAME).read_bytes().hex(), *(f"{name} {keys[name]}" for name in sorted(keys))]
    return hashlib.sha256("\n".join(told).encode()).hexdigest() + "\n"


def _stamped(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _stamp_path(path).read_text(encoding="ascii")
    return None


def _stamp_path(path: Path) -> Path:
    place = os.path.realpath(path)
    return cache_directory() / "checked" / hashlib.sha256(os.fsencode(place)).hexdigest()[:32]
