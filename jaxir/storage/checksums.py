"""SHA256SUMS: the SHA-256 of each file of a directory, in the format of coreutils' `sha256sum -c`.

A machine reads each file once: the user's cache records the sizes and times of verified files.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.core.installation import cache_directory
from jaxir.core.progress import progress
from jaxir.storage.files import atomic_directory, atomic_file
from jaxir.storage.open_files import open_to_read, read_text

NAME = "SHA256SUMS"
MEND = f"copy it again, make it again, or remove {NAME} if you changed it on purpose"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
TOLD_FROM = 2 << 30  # show a progress bar from this many bytes on; fewer are hashed in a second or two


@contextlib.contextmanager
def directory_with_checksums(
    path: str | Path, *, overwrite: bool = False, without: Collection[str] = ()
) -> Iterator[Path]:
    """Like `files.atomic_directory`, but also writes a SHA256SUMS of all files except those in `without`."""
    with atomic_directory(path, overwrite=overwrite) as temporary:
        yield temporary
        write_all(temporary, without=without)


def check(directory: Path, *, without: Collection[str] = (), may_grow: bool = False) -> None:
    """Raises a UserError if a directory differs from its SHA256SUMS; does nothing without that file.

    Args:
      directory: the directory.
      without: files and directories in it that SHA256SUMS does not list.
      may_grow: accept files that SHA256SUMS does not list. Hidden files are always accepted.
    """
    sums = read(directory)
    if sums is None:
        return
    added = [] if may_grow else sorted(set(_names(directory, without)) - sums.keys())
    wrong = [f"{name} is missing" for name in sums if not (directory / name).is_file()]
    wrong += [f"{name} was added after the directory was written" for name in added]
    if not wrong:
        state = _state(directory, [NAME, *sums])
        if _noted(directory) == state:
            return
        found = digests(directory, list(sums))
        wrong = [f"{name} has changed since it was written" for name in sums if found[name] != sums[name]]
    if wrong:
        raise UserError(f"{directory} is damaged: {wrong[0]}, according to {NAME}; {MEND}")
    _note(directory, state)


def read(directory: Path) -> dict[str, str] | None:
    """Returns {name: hash} of a directory's SHA256SUMS; None if it has no such file."""
    path = directory / NAME
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    found = [_LINE.fullmatch(line) for line in lines]
    if None in found:
        at = found.index(None)
        raise UserError(f"{path}:{at + 1}: expected a SHA-256 and a file name, not {lines[at]!r:.40}; {MEND}")
    return {line[2]: line[1] for line in found}


def write(directory: Path, sums: Mapping[str, str]) -> None:
    with atomic_file(directory / NAME) as file:
        file.writelines(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def write_all(directory: Path, *, without: Collection[str] = ()) -> None:
    """Writes a SHA256SUMS of all files of a directory except those in `without`."""
    write(directory, digests(directory, _names(directory, without)))


def is_intact(path: Path, expected: str, digest: Callable[[Path], str]) -> bool:
    """Returns whether `digest(path)`, any hash, is `expected`; does not read an unchanged file again."""
    state = f"{expected} {_state(path.parent, [path.name])}"
    if _noted(path) == state:
        return True
    if digest(path) != expected:
        return False
    _note(path, state)
    return True


def remembered(directory: Path, label: str, facts: str, compute: Callable[[], str]) -> str:
    """Returns `compute()`, a text that depends only on `facts` and on the files of a directory.

    The user's cache keeps the last text of each `label`. It is used until a file or `facts` changes.
    """
    state = hashlib.sha256(f"{facts} {_state(directory, _names(directory, ()))}".encode()).hexdigest()
    path = directory / f".{label}"
    noted, _, text = (_noted(path) or "").partition(" ")
    if noted == state:
        return text
    text = compute()
    _note(path, f"{state} {text}")
    return text


def _names(directory: Path, without: Collection[str]) -> list[str]:
    """Returns all files below a directory except hidden files, SHA256SUMS and those in `without`."""
    found = []
    for place, folders, files in os.walk(directory):
        here = Path(place).relative_to(directory)
        kept = [f for f in folders if not f.startswith(".") and (here / f).as_posix() not in without]
        folders[:] = kept
        found += [(here / f).as_posix() for f in files if not f.startswith(".")]
    return sorted(set(found) - {NAME, *without})


def digests(directory: Path, names: Collection[str]) -> dict[str, str]:
    """Returns {name: SHA-256 (hex)} of files in a directory."""
    total = sum((directory / name).stat().st_size for name in names)
    hidden = total < TOLD_FROM
    with (
        progress(total=total, what=f"checking {directory}", unit="B", hidden=hidden) as bar,
        concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool,
    ):

        def digest(name: str) -> str:
            found = hashlib.sha256()
            with open_to_read(directory / name) as file:
                while piece := file.read(1 << 20):
                    found.update(piece)
                    bar.update(len(piece))
            return found.hexdigest()

        return dict(zip(names, pool.map(digest, names), strict=True))


def _state(directory: Path, names: Iterable[str]) -> str:
    """Returns a hash of files' sizes, times and inodes, which changes when a file is written or replaced."""
    found = [(name, (directory / name).stat()) for name in sorted(names)]
    states = [f"{name} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}" for name, s in found]
    return hashlib.sha256("\n".join(states).encode()).hexdigest()


def _noted(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _note_path(path).read_text(encoding="ascii")
    return None


def _note(path: Path, state: str) -> None:
    """Records in the user's cache, if it is writable, that `path` was verified in this state."""
    with contextlib.suppress(OSError, UserError), atomic_file(_note_path(path)) as file:
        file.write(state)


def _note_path(path: Path) -> Path:
    place = os.path.realpath(path)
    return cache_directory() / "checked" / hashlib.sha256(os.fsencode(place)).hexdigest()[:32]
