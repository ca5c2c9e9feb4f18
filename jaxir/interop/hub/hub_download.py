"""Files of the hub into the cache that huggingface_hub and transformers share, whatever breaks off amid them.

huggingface_hub itself begins a file anew in each process. Here a part of one stays where it is, as
`blobs/ETAG.incomplete`, and whoever asks next goes on from its end; so 40 GB need not come in one go.
"""

import contextlib
import fcntl
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.storage import checksums
from jaxir.storage.files import atomic_file
from jaxir.storage.open_files import open_to_read

T = TypeVar("T")

ATTEMPTS = 5  # without a byte; a server that sends something is asked again
PAUSE_SECONDS = 0.5  # after the first, and twice as long after each
# A request's share of a file: the hub signs addresses for an hour, and sends no more than 50 GB at once.
_SHARE = 4 << 30
_PIECE = 1 << 20


class Listed(NamedTuple):
    """What the hub's list says of a file: its size in bytes and its hash, which names it in the cache."""

    size: int
    etag: str


class Repository:
    """The files of one commit, there and in the cache.

    Args:
      name: OWNER/NAME.
      commit: its hash.
      files: what the hub says of each, by path.
    """

    def __init__(self, name: str, commit: str, files: Mapping[str, Listed]):
        self.name, self.commit, self.files = name, commit, files
        self._folder = cache_of(name)
        self.directory = self._folder / "snapshots" / commit

    def cached(self, file: str) -> bool:
        """Whether a file is here, whole."""
        return (self.directory / file).is_file()

    def here(self, file: str) -> int:
        """Returns how many bytes of a file are here."""
        return self.files[file].size if self.cached(file) else self._here(self.files[file].etag)

    def _here(self, etag: str) -> int:
        blob = self._folder / "blobs" / etag
        return _size(blob) or _size(_aside(blob))

    def fetch(self, file: str, came: Callable[[int], None] = lambda n: None) -> Path:
        """Fetches a file, unless it is here, from where an earlier attempt has stopped.

        While another process fetches it, this one waits for that.

        Args:
          file: its path.
          came: told how many bytes more are here, be it by this process or another; less than none where
            something must be fetched again.

        Raises:
          UserError: the connection breaks again and again, the disk is full, or what came is damaged.
          Exception: of huggingface_hub and its HTTP library: the hub cannot be reached, or refuses it.
        """
        import huggingface_hub

        if self.cached(file):
            check(self.directory, [file])
            return self.directory / file
        url = huggingface_hub.hf_hub_url(self.name, file, revision=self.commit)
        about = _patiently(lambda: huggingface_hub.get_hf_file_metadata(url))
        if about.etag and re.fullmatch(r"[\w-]+", about.etag):
            size = self.files[file].size if about.size is None else about.size
            told = _Told(came, self._here(about.etag))
            blob = self._folder / "blobs" / about.etag
            blob.parent.mkdir(parents=True, exist_ok=True)
            locks = self._folder.parent / ".locks" / self._folder.name
            locks.mkdir(parents=True, exist_ok=True)
            with _locked(locks / f"{about.etag}.lock", lambda: told.have(_size(_aside(blob)))):
                if not blob.exists():
                    _download(url, blob, size, told, f"{self.name}/{file}")
            told.have(size)
        # There is nothing left to fetch: it gives the blob its name in the snapshot.
        return Path(huggingface_hub.hf_hub_download(self.name, file, revision=self.commit))

    def remember(self, revision: str) -> None:
        """Writes down which commit a branch or tag was, for when the hub cannot be asked."""
        path = self._folder / "refs" / revision
        if revision != self.commit and not (path.is_file() and path.read_text() == self.commit):
            # A cache that cannot be written to may have all the files nevertheless.
            with contextlib.suppress(OSError), atomic_file(path) as file:
                file.write(self.commit)


def cache() -> Path:
    """Returns the directory of all models from the hub (see HF_HOME and HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cache_of(name: str) -> Path:
    """Returns the directory of one model in the cache."""
    return cache() / f"models--{name.replace('/', '--')}"


def snapshot(name: str, revision: str) -> Path | None:
    """Returns the directory of a commit, branch or tag as far as it is in the cache."""
    folder = cache_of(name)
    ref = folder / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    directory = folder / "snapshots" / commit
    return directory if re.fullmatch("[0-9a-f]{40}", commit) and directory.is_dir() else None


def check(directory: Path, files: Iterable[str]) -> None:
    """Checks that files of a commit in the cache are what the hub gave; each is read once on a machine.

    Their hashes name them there. Where the cache holds copies instead of links, nothing is known of them.

    Raises:
      UserError: one is not.
    """
    for file in files:
        blob = (directory / file).resolve()
        known = blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name)
        if known and blob.is_file() and not checksums.is_intact(blob, blob.name, _hash_of):
            raise UserError(
                f"{directory / file} is damaged: it is not what came from the hub; remove {blob}, and the"
                " same command fetches it again"
            )


def check_room(size: int, what: str) -> None:
    """Checks that the disk of the cache has room.

    Raises:
      UserError: it has not.
    """
    place = next(p for p in (cache().absolute(), *cache().absolute().parents) if p.is_dir())
    if (free := shutil.disk_usage(place).free) < size:
        raise UserError(
            f"{what}: {in_bytes(size)} are to come, and {place} has {in_bytes(free)} of room: make more,"
            " or set HF_HOME to a directory on another disk"
        )


def in_bytes(size: int) -> str:
    """Returns a size as people write it, as "990 MB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


class _Told:
    """Turns how much of a file is here into how much more."""

    def __init__(self, came: Callable[[int], None], seen: int):
        self._came, self._seen = came, seen

    def have(self, size: int) -> None:
        if size != self._seen:
            self._came(size - self._seen)
            self._seen = size


def _aside(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock that huggingface_hub takes for the same file."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(0.2)
        yield


class _Part:
    """The first bytes of a file, and the hash of them.

    Args:
      file: what is here of it, opened for reading and appending.
      etag: the hash of the whole.
      size: of the whole.
      told: told of every byte.
    """

    def __init__(self, file: BinaryIO, etag: str, size: int, told: _Told):
        self._file, self._etag, self.whole, self._told = file, etag, size, told
        self._digest, self.size = self._new_digest(), 0
        file.seek(0)
        while piece := file.read(_PIECE):
            self._digest.update(piece)
            self.size += len(piece)
        told.have(self.size)
        if self.size > size:
            self._restart()

    def _new_digest(self) -> Any:
        return _digest_like(self._etag, self.whole)

    def _restart(self) -> None:
        self._file.truncate(0)
        self._digest, self.size = self._new_digest(), 0
        self._told.have(0)

    def append_from(self, url: str) -> None:
        """Asks for a share of what is missing and takes what comes of it."""
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        asked = {
            "Range": f"bytes={self.size}-{min(self.whole, self.size + _SHARE) - 1}",
            "Accept-Encoding": "identity",
        }
        headers = build_hf_headers(library_name="jaxir") | asked
        with huggingface_hub.get_session().stream(
            "GET", url, headers=headers, timeout=30, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            if self.size and response.status_code != 206:  # the server knows no ranges
                self._restart()
            before = self.size
            for piece in response.iter_bytes():
                self._file.write(piece)
                self._digest.update(piece)
                self.size += len(piece)
                self._told.have(self.size)
        if self.size == before:
            raise ConnectionError("the server sent nothing")

    def is_it(self) -> bool:
        """Whether it is the whole file; true where the hub says no hash of it."""
        self._file.flush()
        known = len(self._etag) in (40, 64)
        return self.size == self.whole and (not known or self._digest.hexdigest() == self._etag)


def _digest_like(etag: str, size: int) -> Any:
    """Returns a new digest of the kind of a file's hash: SHA-256 of a large one, git's SHA-1 of another."""
    return hashlib.sha256() if len(etag) == 64 else hashlib.sha1(f"blob {size}\0".encode())


def _hash_of(blob: Path) -> str:
    size = blob.stat().st_size
    digests, hidden = [_digest_like(blob.name, size)], size < checksums.TOLD_FROM
    if len(blob.name) == 40:
        digests.append(hashlib.sha1())  # some mirrors of the hub send that of the content alone
    with (
        progress(total=size, what=f"checking {blob}", unit="B", hidden=hidden) as bar,
        open_to_read(blob) as file,
    ):
        while piece := file.read(_PIECE):
            for digest in digests:
                digest.update(piece)
            bar.update(len(piece))
    found = [digest.hexdigest() for digest in digests]
    return blob.name if blob.name in found else found[0]


def _download(url: str, blob: Path, size: int, told: _Told, what: str) -> None:
    aside = _aside(blob)
    with aside.open("a+b") as file:
        part = _Part(file, blob.name, size, told)
        check_room(size - part.size, what)
        while part.size < size:
            try:
                _patiently(lambda: part.append_from(url), lambda: part.size)
            except Exception as error:
                if not _passing(error):
                    raise
                raise UserError(
                    f"{what}: the connection broke off at {in_bytes(part.size)} of {in_bytes(size)}"
                    f" ({reason(error)}); run the same command again, it goes on from there"
                ) from error
        whole = part.is_it()
    if not whole:
        aside.unlink()
        raise UserError(f"{what}: what came is not the file that the hub announced; try again")
    aside.replace(blob)


def _patiently(action: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """Returns what `action` returns, tried again where it fails by the connection or by a busy server."""
    tries = 0
    while True:
        before = progress()
        try:
            return action()
        except Exception as error:
            tries = 1 if progress() > before else tries + 1
            if not _passing(error) or tries >= ATTEMPTS:
                raise
        time.sleep(PAUSE_SECONDS * 2 ** (tries - 1))


def _passing(error: Exception) -> bool:
    """Whether an error may pass by itself: of the connection or the server, not of the disk or a refusal."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429, 500, 502, 503, 504)
    return isinstance(error, ConnectionError) or not isinstance(error, OSError | UserError)


def reason(error: BaseException) -> str:
    """Returns the system's own words for what is at the root of an error, or its first line."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) <= 160 else f"{text[:160]}..."
