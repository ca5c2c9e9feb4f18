"""SHA256SUMS: the hashes of a directory's files, written with them and compared when they are opened.

The format is that of coreutils, so that `sha256sum -c SHA256SUMS` compares them too. Each content is read
once on a machine: the user's cache notes sizes and times of verified files, which are not read again while
these stay the same. Files with known hashes of another kind (the hub's, torch's) are verified likewise.
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
from jaxir.storage.files import atomic_directory, atomic_file, inside
from jaxir.storage.open_files import open_to_read, read_text

NAME = "SHA256SUMS"
MEND = f"copy it again, make it anew, or remove {NAME} if it was changed on purpose"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
# Files of less are read in a second or two; of more, a bar says how far it is.
TOLD_FROM = 2 << 30


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
    with atomic_directory(path, overwrite=overwrite) as temporary:
        yield temporary
        write_all(temporary, without=without)


def check(directory: Path, *, without: Collection[str] = (), may_grow: bool = False) -> None:
    """Checks that a directory holds what was written; one without SHA256SUMS is taken as it is.

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
    added = [] if may_grow else sorted(set(_names(directory, without)) - sums.keys())
    wrong = [f"{name} is missing" for name in sums if not (directory / name).is_file()]
    wrong += [f"{name} was not there when it was written" for name in added]
    if not wrong:
        state = _state(directory, [NAME, *sums])
        if _noted(directory) == state:
            return
        found = _digests(directory, list(sums))
        wrong = [f"{name} is not what was written" for name in sums if found[name] != sums[name]]
    if not wrong:
        _note(directory, state)
    elif read(directory) != sums:  # another process has just replaced the directory
        check(directory, without=without, may_grow=may_grow)
    else:
        raise UserError(f"{directory} is damaged: {wrong[0]} ({NAME} says what was); {MEND}")


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
        file.writelines(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def write_all(directory: Path, *, without: Collection[str] = ()) -> None:
    """Writes a SHA256SUMS of all files of a directory that is being written, but for those of `without`."""
    write(directory, _digests(directory, _names(directory, without)))


def take_up(directory: Path, names: Collection[str]) -> dict[str, str]:
    """Writes a SHA256SUMS of files, and returns it; those that the one before lists are not read."""
    path = directory / NAME
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = filter(None, map(_LINE.fullmatch, text.splitlines()))
    sums = {line[2]: line[1] for line in found if line[2] in names}
    sums |= _digests(directory, [name for name in names if name not in sums])
    write(directory, sums)
    return sums


def is_intact(path: Path, expected: str, digest: Callable[[Path], str]) -> bool:
    """Returns whether a file whose hash is known has it. As in `check`, an unchanged file is read once.

    Args:
      path: the file.
      expected: its hash, of whatever kind.
      digest: reads the file and returns that hash.
    """
    state = f"{expected} {_state(path.parent, [path.name])}"
    if _noted(path) == state:
        return True
    if digest(path) != expected:
        return False
    _note(path, state)
    return True


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


def _state(directory: Path, names: Iterable[str]) -> str:
    """Returns a hash of what changes with files: their sizes, times and inodes."""
    found = [(name, (directory / name).stat()) for name in sorted(names)]
    told = [f"{name} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}" for name, s in found]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _noted(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _note_path(path).read_text(encoding="ascii")
    return None


def _note(path: Path, state: str) -> None:
    """Notes that what `path` was in this state is verified; a cache that cannot be written is no matter."""
    with contextlib.suppress(OSError, UserError), atomic_file(_note_path(path)) as file:
        file.write(state)


def _note_path(path: Path) -> Path:
    place = os.path.realpath(path)
    return cache_directory() / "checked" / hashlib.sha256(os.fsencode(place)).hexdigest()[:32]
