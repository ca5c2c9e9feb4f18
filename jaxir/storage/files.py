"""Paths that may be in a bucket, and output files and directories that appear only when whole.

`path_of` gives what reads and writes a place, be it a local path or gs://BUCKET/PATH. Buckets are reached
through gcsfs, which only a process that names one imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.storage.temporary_outputs import remove_directory, temporary_output

BUCKET_SECONDS = 20.0  # how long a bucket may take to answer at first, attempts included


def is_bucket(path: str | Path) -> bool:
    """Whether a path is in a bucket."""
    return str(path).startswith("gs://")


def path_of(place: str | Path) -> Path:
    """Returns the path of a local file or directory, or of an object in a bucket, which has the same methods.

    In a bucket there are no directories: one is there as long as something is in it, and `mkdir` does
    nothing. A file that is written there appears when whole. `Path.rename` of a directory is `move_tree`.

    Raises:
      UserError: `place` is a URL of another kind than gs://BUCKET/PATH, or gcsfs is not installed.
    """
    if not is_bucket(place):
        if re.match(r"\w\w+://", str(place)):
            raise UserError(f"{place}: only local paths and gs://BUCKET/PATH can be read and written")
        return Path(place)
    if not re.fullmatch(r"gs://[^/]+(/.*)?", str(place)):
        raise UserError(f"{place}: a directory in a bucket is written gs://BUCKET/PATH")
    try:
        _prepare_gcsfs()
    except ModuleNotFoundError as error:
        raise UserError(
            f"{place}: {error.name} is needed to reach a bucket: {how_to_install('gcs')}"
        ) from error
    from etils import epath

    return epath.Path(place)


def check_bucket(path: Path, *, writing: bool = False) -> None:
    """Checks, in seconds, that the bucket of `path` answers; nothing where `path` is local.

    Libraries try for minutes to reach a bucket, and each has its own way of giving up.

    Args:
      path: from `path_of`.
      writing: whether a run is to be written there, for which credentials are needed.

    Raises:
      UserError: there is no such bucket, there are no credentials for it, or it cannot be reached.
    """
    if not is_bucket(path):
        return
    from google.api_core import exceptions
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage
    from google.cloud.storage.retry import DEFAULT_RETRY

    bucket, _, prefix = str(path).removeprefix("gs://").partition("/")
    how = {"timeout": BUCKET_SECONDS / 2, "retry": DEFAULT_RETRY.with_timeout(BUCKET_SECONDS)}
    try:
        try:
            client = storage.Client()
        except DefaultCredentialsError:
            if writing:
                raise
            client = storage.Client.create_anonymous_client()
        if writing:  # Orbax asks for the bucket too
            client.get_bucket(bucket, **how)
        next(iter(client.list_blobs(bucket, prefix=prefix, max_results=1, **how)), None)
    except DefaultCredentialsError as error:
        raise UserError(
            f"{path}: no Google credentials here; run `gcloud auth application-default login` or set"
            " GOOGLE_APPLICATION_CREDENTIALS"
        ) from error
    except exceptions.NotFound as error:
        raise UserError(f"{path}: there is no bucket {bucket}") from error
    except (exceptions.Forbidden, exceptions.Unauthorized) as error:
        needed = "Storage Object User and Storage Bucket Viewer" if writing else "Storage Object Viewer"
        raise UserError(
            f"{path}: these credentials may not use the bucket {bucket}; the roles needed there: {needed}"
        ) from error
    except Exception as error:  # of requests, urllib3, google.auth, google.api_core
        raise UserError(f"{path}: the bucket cannot be reached ({_reason(error)})") from error


def check_unicode(path: Path) -> None:
    """Checks that a model's directory has a name that the libraries which read and write models can take.

    Raises:
      UserError: a byte in its absolute path is no UTF-8.
    """
    try:
        str(path if is_bucket(path) else path.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path} has a byte in its path that is no UTF-8: a model can't lie there") from None


def remove_tree(path: Path) -> None:
    """Removes a directory with all that is in it, as far as it can."""
    if is_bucket(path):
        with contextlib.suppress(Exception):
            path.rmtree()
    else:
        remove_directory(path)


def move_tree(source: Path, target: Path) -> None:
    """Moves a directory. In a bucket object after object: if it is interrupted, a part of them has moved."""
    if is_bucket(source):
        import fsspec

        bucket = fsspec.filesystem("gcs", finalize_on_close=True)  # the very object that etils uses
        for name in bucket.find(str(source)):
            bucket.mv(name, f"{target}/{name.removeprefix(str(source).removeprefix('gs://') + '/')}")
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)


@contextlib.contextmanager
def atomic_file(path: str | Path, mode: str = "w", **kwargs: Any) -> Iterator[IO[Any]]:
    """Opens a file beside `path` for writing; renames it to `path` on success, removes it on any error.

    What a killed process has left beside `path` goes, too.

    In a bucket the content is kept in memory and sent at the end, as one object.

    Raises:
      UserError: the bucket did not take it.
    """
    path = path_of(path)
    if "b" not in mode:
        kwargs.setdefault("encoding", "utf-8")
    if is_bucket(path):
        content = io.BytesIO()
        file = content if "b" in mode else io.TextIOWrapper(content, **kwargs)
        yield file
        file.flush()
        try:
            path.write_bytes(content.getvalue())
        except Exception as error:  # of gcsfs, aiohttp, google.auth
            raise UserError(f"{path} could not be written ({_reason(error)})") from error
        return
    check_replaceable(path)
    path = Path(os.path.realpath(path))  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_output(path, directory=False) as (temporary, descriptor):
        try:
            with os.fdopen(descriptor, mode, closefd=False, **kwargs) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_replaceable(path: Path) -> None:
    """Checks that nothing but a file is at a local path.

    Raises:
      UserError: something else is there, or nothing can be there.
    """
    found = status_of(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is {'a directory' if path.is_dir() else 'no file'}; give a file to write")


def status_of(path: Path) -> os.stat_result | None:
    """Returns what is at a local path, None where nothing is.

    Raises:
      UserError: nothing can be there.
    """
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written ({_words(error)})") from None


def check_new_directory(path: str | Path) -> None:
    """Checks that `atomic_directory` can write a directory there, before work begins.

    Raises:
      UserError: `path` exists and is not an empty directory, nothing can be written there, or it is in a
        bucket.
    """
    check_free(local_path(path, "written to"))


def check_free(path: Path) -> None:
    """Checks that nothing is where a directory is to be written, and that it can be.

    Args:
      path: from `path_of`.

    Raises:
      UserError: it exists and is not an empty directory, or nothing can be written there.
    """
    if is_bucket(path):
        taken = path.exists()
    else:
        found = status_of(path)
        taken = found is not None and not (stat.S_ISDIR(found.st_mode) and not any(path.iterdir()))
    if taken:
        raise UserError(f"{path} already exists; give another output or remove it first")
    if not is_bucket(path):
        if os.path.ismount(path):  # whose name nothing else can get
            raise UserError(f"{path} is where a file system is mounted; give a directory in it")
        check_room(path)


def check_room(path: Path) -> None:
    """Checks that something can be made at a local path, and the directories above it that are missing.

    Raises:
      UserError: it cannot.
    """
    above = Path(os.path.realpath(path))
    try:
        names = [above.name]
        while not (above := above.parent).exists():
            names.append(above.name)
        with tempfile.TemporaryFile(dir=above):
            pass
        if max(len(os.fsencode(name)) for name in names) > os.pathconf(above, "PC_NAME_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({_words(error)})") from None


@contextlib.contextmanager
def atomic_directory(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory beside `path`; renames it to `path` on success, removes it on any error.

    What a killed process has left beside `path` goes, too.

    Raises:
      UserError: `path` is not an empty directory, and `overwrite` is false, be it at the beginning or because
        another process has written it meanwhile; nothing can be written there; or it is in a bucket.
    """
    if not overwrite:
        check_new_directory(path)
    path = Path(os.path.realpath(local_path(path, "written to")))  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_output(path, directory=True) as (temporary, _):
        try:
            yield temporary
            if not _renamed(temporary, path):
                if not overwrite:
                    raise UserError(
                        f"{path} is there now, by another process, and stays as it is; what this one made is"
                        " gone"
                    )
                if _exchanged(temporary, path):
                    remove_directory(temporary)
                else:  # there is a moment without either: the old one's name is none that others remove
                    old = temporary.with_suffix(".old")
                    path.rename(old)
                    temporary.rename(path)
                    remove_directory(old)
        except BaseException:
            remove_directory(temporary)
            raise


def local_path(place: str | Path, where: str = "read from") -> Path:
    """Returns the path of what cannot be in a bucket.

    Args:
      place: what the user gave.
      where: what is done with it, for the sentence.

    Raises:
      UserError: it is a URL.
    """
    if re.match(r"\w\w+://|gs:/", str(place)):  # the second has been a `Path`
        bucket = "copy it to the bucket afterwards" if where == "written to" else "copy it here first"
        raise UserError(f"{place}: this is {where} local paths only; {bucket}")
    return Path(place)


def inside(directory: str | Path, name: object, *, said_by: str | Path) -> str:
    """Returns the path of what a file of a directory names in it, never one outside.

    Args:
      directory: where it must be; local or gs://BUCKET/PATH.
      name: what the file says: a path relative to `directory`.
      said_by: the file.

    Raises:
      UserError: it is no such path: absolute, with `..`, or a link that leads out of the directory (but for
        those of the hub's cache, whose snapshots link to the blobs beside them).
    """
    path = f"{directory}/{name}"
    if not isinstance(name, str) or not name.strip("/.") or "\0" in name:
        raise UserError(f"{said_by}: {name!r:.80} is no name of a file beside it")
    if name.startswith("/") or ".." in name.split("/"):
        raise UserError(f"{said_by}: {name!r:.80} lies outside of {directory}")
    if not is_bucket(directory):
        roots = [Path(os.path.realpath(directory))]
        above = Path(directory).absolute()
        roots += [Path(os.path.realpath(p.parent / "blobs")) for p in above.parents if p.name == "snapshots"]
        found = Path(os.path.realpath(path))
        if not any(found.is_relative_to(root) for root in roots):
            raise UserError(f"{said_by}: {name!r:.80} is a link that leads out of {directory}, to {found}")
    return path


def _words(error: OSError | ValueError) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _renamed(source: Path, target: Path) -> bool:
    """Renames a directory; false where something is there but an empty directory."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _exchanged(one: Path, other: Path) -> bool:
    """Lets two directories of one file system change names in one step; false where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


@functools.cache
def _prepare_gcsfs() -> None:
    """Makes etils use gcsfs, not TensorFlow where that is installed, and gcsfs list what is there now."""
    os.environ.setdefault("EPATH_USE_TF", "false")
    # Its support for other kinds of buckets asks Google's control service about each one, over gRPC.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec.config
    import gcsfs  # noqa: F401 (fsspec imports it late, and says less where it is missing)
    from etils.epath import gpath

    # TensorStore writes to the same places, of which a cache would know nothing.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    gpath._is_tf_installed.cache_clear()  # it has been asked where a local path was used before
    for name in ("gcsfs", "google.auth"):  # what they say is said by the error that follows
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _reason(error: BaseException) -> str:
    """Returns what is at the root of an error, in one line: the system's own words where there are some."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    if told := re.search(r"\[Errno -?\d+\] ([\w ]+)", text):
        return told[1].lower()
    return text if len(text) <= 160 else f"{text[:160]}..."
