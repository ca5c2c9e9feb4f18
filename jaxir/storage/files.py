"""Paths that may be in a bucket, and output files and directories that appear only when complete."""

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

from jaxir.core.errors import UserError, root_reason
from jaxir.core.installation import how_to_install
from jaxir.storage.temporary_outputs import remove_directory, temporary_output

BUCKET_SECONDS = 20.0  # time limit for a bucket's first answer, retries included
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of the Linux call renameat2


def is_bucket(path: str | Path) -> bool:
    return str(path).startswith("gs://")


def path_of(place: str | Path) -> Path:
    """Returns a local path, or a path in a bucket (gs://BUCKET/PATH), which has the same methods.

    A bucket has no directories: `exists` is true while any object has the prefix, and `mkdir` does nothing.
    """
    if not is_bucket(place):
        if re.match(r"\w\w+://", str(place)):
            raise UserError(f"{place}: only local paths and gs://BUCKET/PATH can be read and written")
        return Path(place)
    if not re.fullmatch(r"gs://[^/]+(/.*)?", str(place)):
        raise UserError(f"{place}: a path in a bucket must have the form gs://BUCKET/PATH")
    try:
        _prepare_gcsfs()
    except ModuleNotFoundError as error:
        raise UserError(
            f"{place}: the package {error.name} is needed to reach a bucket; run: {how_to_install('gcs')}"
        ) from error
    from etils import epath

    return epath.Path(place)


def check_bucket(path: Path, *, writing: bool = False) -> None:
    """Checks within seconds that the bucket of `path` answers; libraries would retry for minutes.

    Args:
      path: a path from `path_of`; a local path is not checked.
      writing: whether the user's credentials must also permit writing.
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
        if writing:  # Orbax also requests the bucket's metadata, which needs one more role.
            client.get_bucket(bucket, **how)
        next(iter(client.list_blobs(bucket, prefix=prefix, max_results=1, **how)), None)
    except DefaultCredentialsError as error:
        raise UserError(
            f"{path}: no Google credentials found; run `gcloud auth application-default login` or set"
            " GOOGLE_APPLICATION_CREDENTIALS"
        ) from error
    except exceptions.NotFound as error:
        raise UserError(f"{path}: there is no bucket {bucket}; correct its name or create it") from error
    except (exceptions.Forbidden, exceptions.Unauthorized) as error:
        needed = "Storage Object User and Storage Bucket Viewer" if writing else "Storage Object Viewer"
        raise UserError(
            f"{path}: your credentials may not use the bucket {bucket}; give them these roles there: {needed}"
        ) from error
    except Exception as error:  # the libraries' errors have no common class
        raise UserError(
            f"{path}: the bucket cannot be reached ({root_reason(error)}); check the network"
        ) from error


def remove_tree(path: Path) -> None:
    """Removes a directory and its contents, as far as possible."""
    if is_bucket(path):
        with contextlib.suppress(Exception):
            path.rmtree()
    else:
        remove_directory(path)


def move_tree(source: Path, target: Path) -> None:
    """Moves a directory. In a bucket, objects move one by one, so an interruption leaves it partly moved."""
    if is_bucket(source):
        import fsspec

        # fsspec caches this object, so etils uses it, too.
        bucket = fsspec.filesystem("gcs", finalize_on_close=True)
        for name in bucket.find(str(source)):
            bucket.mv(name, f"{target}/{name.removeprefix(str(source).removeprefix('gs://') + '/')}")
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)


@contextlib.contextmanager
def atomic_file(path: str | Path, mode: str = "w", **kwargs: Any) -> Iterator[IO[Any]]:
    """Opens a file beside `path` for writing; renames it to `path` on success, removes it on any error.

    Also removes files that killed processes left beside `path`. The content of an object in a
    bucket is kept in memory and uploaded at the end.
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
        except Exception as error:  # the libraries' errors have no common class
            raise UserError(
                f"{path} could not be written ({root_reason(error)}); check the network and your roles"
            ) from error
        return
    check_replaceable(path)
    # If `path` is a link, write to its target instead of replacing the link.
    path = Path(os.path.realpath(path))
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
    """Raises a UserError if a local path exists and is not a regular file."""
    found = status_of(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"{path} is {'a directory' if path.is_dir() else 'not a regular file'}; give a file to write"
        )


def status_of(path: Path) -> os.stat_result | None:
    """Returns the status of a local path, None if nothing exists there."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _not_writable(path, error) from None


def check_new_directory(path: str | Path) -> None:
    """Checks that `atomic_directory` can write a new directory."""
    check_free(local_path(path, "written to"))


def check_free(path: Path) -> None:
    """Checks that a path, local or in a bucket, is missing or an empty directory, and can be written."""
    if is_bucket(path):
        taken = path.exists()
    else:
        found = status_of(path)
        taken = found is not None and not (stat.S_ISDIR(found.st_mode) and not any(path.iterdir()))
    if taken:
        raise UserError(f"{path} already exists; give another output or remove it first")
    if not is_bucket(path):
        if os.path.ismount(path):  # a directory cannot be renamed to a mount point
            raise UserError(f"{path} is a mount point; give a directory in it")
        check_room(path)


def check_room(path: Path) -> None:
    """Checks that a local path and the missing directories above it can be created."""
    above = Path(os.path.realpath(path)).parent
    try:
        while not above.exists():
            above = above.parent
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise _not_writable(path, error) from None


@contextlib.contextmanager
def atomic_directory(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory beside `path`; renames it to `path` on success, removes it on any error.

    Also removes directories that killed processes left beside `path`. Without `overwrite`, `path` must be
    missing or an empty directory.
    """
    if not overwrite:
        check_new_directory(path)
    path = Path(os.path.realpath(local_path(path, "written to")))  # keep `path` if it is a link
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_output(path, directory=True) as (temporary, _):
        try:
            yield temporary
            if not _renamed(temporary, path):
                if not overwrite:
                    raise UserError(
                        f"another process wrote {path} meanwhile, so this process's output was"
                        " discarded; run the command again with another output, or remove this one first"
                    )
                _replace(path, temporary)
        except BaseException:
            remove_directory(temporary)
            raise


def local_path(place: str | Path, where: str = "read from") -> Path:
    """Returns a local path; raises a UserError for a path elsewhere. `where` is part of the message."""
    if re.match(r"\w\w+://|gs:/", str(place)):  # `Path` turns gs:// into gs:/
        bucket = "copy it to the bucket afterwards" if where == "written to" else "copy it here first"
        raise UserError(f"{place}: this can be {where} local paths only; {bucket}")
    return Path(place)


def inside(directory: str | Path, name: object, *, said_by: str | Path) -> str:
    """Returns the path of a file in `directory` that the file `said_by` names; refuses a path outside it.

    Links out of `directory` are only allowed in Hugging Face's cache, whose snapshots link to their blobs.
    """
    path = f"{directory}/{name}"
    if not isinstance(name, str) or not name.strip("/.") or "\0" in name:
        raise UserError(
            f"{said_by}: {name!r:.80} is not the name of a file; copy the directory again from its source"
        )
    if name.startswith("/") or ".." in name.split("/"):
        raise UserError(
            f"{said_by}: {name!r:.80} lies outside of {directory}; copy the directory again from its source"
        )
    if not is_bucket(directory):
        roots = [Path(os.path.realpath(directory))]
        above = Path(directory).absolute()
        roots += [Path(os.path.realpath(p.parent / "blobs")) for p in above.parents if p.name == "snapshots"]
        found = Path(os.path.realpath(path))
        if not any(found.is_relative_to(root) for root in roots):
            raise UserError(
                f"{said_by}: {name!r:.80} is a link out of {directory}, to {found}; replace it by the file"
            )
    return path


def _not_writable(path: Path, error: OSError | ValueError) -> UserError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return UserError(f"{path} cannot be written ({reason})")


def _renamed(source: Path, target: Path) -> bool:
    """Renames a directory; returns False if anything but an empty directory is at the target."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _replace(old: Path, new: Path) -> None:
    """Replaces the directory `old` by `new`, atomically if the file system can exchange two names."""
    names = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old))
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is not None and rename(*names, _RENAME_EXCHANGE) == 0:
        remove_directory(new)
        return
    aside = new.with_suffix(".old")  # other processes may remove *.part, but not *.old
    old.rename(aside)
    new.rename(old)
    remove_directory(aside)


@functools.cache
def _prepare_gcsfs() -> None:
    """Makes etils use gcsfs instead of TensorFlow, without a cache of listings."""
    os.environ.setdefault("EPATH_USE_TF", "false")
    # Keep gcsfs from requesting each bucket's kind (flat or hierarchical) from a control service over gRPC.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec.config
    import gcsfs  # noqa: F401 (fsspec would import it later, with a less clear error)
    from etils.epath import gpath

    # TensorStore writes to the same buckets, and a cache of listings would miss the new objects.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    gpath._is_tf_installed.cache_clear()  # etils caches this result if a local path was used before
    for name in ("gcsfs", "google.auth"):  # Warnings of these libraries repeat the error that is raised next.
        logging.getLogger(name).setLevel(logging.CRITICAL)
