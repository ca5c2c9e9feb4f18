"""SHA256SUMS: the SHA-256 of each file of a directory, in the format of coreutils' `sha256sum -c`.

Each content is read once on a machine: the user's cache notes sizes and times of verified files.
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
MEND = f"copy it again, make it anew, or remove {NAME} if it was changed on purpose"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
TOLD_FROM = 2 << 30  # bytes; hashing fewer takes a second or two, so no progress bar is shown


@contextlib.contextmanager
def directory_with_checksums(
    path: str | Path, *, overwrite: bool = False, without: Collection[str] = ()
) -> Iterator[Path]:
    """Does what `files.atomic_directory` does, and adds a SHA256SUMS of all files but those of `without`."""
    with atomic_directory(path, overwrite=overwrite) as temporary:
        yield temporary
        write_all(temporary, without=without)


def check(directory: Path, *, without: Collection[str] = (), may_grow: bool = False) -> None:
    """Checks that a directory holds what was written; one without SHA256SUMS is not checked.

    Args:
      directory: the directory.
      without: files and directories in it that are not listed.
      may_grow: whether unlisted files are accepted. Hidden files always are.
    """
    sums = read(directory)
    if sums is None:
        return
    added = [] if may_grow else sorted(set(_names(directory, without)) - sums.keys())
    wrong = [f"{name} is missing" for name in sums if not (directory / name).is_file()]
    wrong += [f"{name} was not there when it was written" for name in added]
    if not wrong:
        state = _state(directory, [NAME, *sums])
        if _noted(directory) == state:
            return
        found = digests(directory, list(sums))
        wrong = [f"{name} is not what was written" for name in sums if found[name] != sums[name]]
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
    """Writes a SHA256SUMS of all files of a directory but those of `without`."""
    write(directory, digests(directory, _names(directory, without)))


def is_intact(path: Path, expected: str, digest: Callable[[Path], str]) -> bool:
    """Returns whether `digest(path)`, a hash of any kind, is `expected`; an unchanged file is read once."""
    state = f"{expected} {_state(path.parent, [path.name])}"
    if _noted(path) == state:
        return True
    if digest(path) != expected:
        return False
    _note(path, state)
    return True


def _names(directory: Path, without: Collection[str]) -> list[str]:
    """Returns all files below a directory but hidden ones, SHA256SUMS and those of `without`."""
    found = []
    for place, folders, files in os.walk(directory):
        here = Path(place).relative_to(directory)
        kept = [f for f in folders if not f.startswith(".") and (here / f).as_posix() not in without]
        folders[:] = kept
        found += [(here / f).as_posix() for f in files if not f.startswith(".")]
    return sorted(set(found) - {NAME, *without})


def digests(directory: Path, names: Collection[str]) -> dict[str, str]:
    """Returns the SHA-256 of files by name."""
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
    """Returns a hash of the sizes, times and inodes of files."""
    found = [(name, (directory / name).stat()) for name in sorted(names)]
    states = [f"{name} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}" for name, s in found]
    return hashlib.sha256("\n".join(states).encode()).hexdigest()


def _noted(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _note_path(path).read_text(encoding="ascii")
    return None


def _note(path: Path, state: str) -> None:
    """Notes that `path` was verified in this state; without a writable cache it is verified each time."""
    with contextlib.suppress(OSError, UserError), atomic_file(_note_path(path)) as file:
        file.write(state)


def _note_path(path: Path) -> Path:
    place = os.path.realpath(path)
    return cache_directory() / "checked" / hashlib.sha256(os.fsencode(place)).hexdigest()[:32]
