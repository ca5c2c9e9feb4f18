"""Directories, local or in a Google Cloud Storage bucket, and the arrays in them, through TensorStore.

A directory is a local path or `gs://BUCKET/PATH`. Credentials for buckets are found as Google's own tools
find them; without any, public buckets can be read.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import tensorstore

from jaxir.core.errors import UserError
from jaxir.interop.weights import array_checksums
from jaxir.interop.weights.lazy import Index, LazyArray
from jaxir.storage.files import inside, is_bucket

T = TypeVar("T")

ORBAX_INDEX = "_METADATA"
_ORBAX_MANIFEST = "manifest.ocdbt"
# The cache: parts of one chunk that are asked for one after another are fetched and decompressed once.
_CONTEXT = {"cache_pool": {"total_bytes_limit": 1 << 28}, "gcs_request_retries": {"max_retries": 6}}


def tidy(directory: str) -> str:
    """Returns a directory without "~" and without a slash at its end.

    Raises:
      UserError: it is a URL of another kind than gs://BUCKET/PATH.
    """
    if is_bucket(directory):
        if not re.fullmatch(r"gs://[^/]+(/.+)?", directory):
            raise UserError(f"{directory}: a directory in a bucket is written gs://BUCKET/PATH")
        return directory.rstrip("/")
    if "://" in directory:
        raise UserError(f"{directory}: only local paths and gs:// can be read and written")
    return str(Path(directory).expanduser())


def spec(directory: str) -> dict[str, Any]:
    """Returns TensorStore's specification of a directory."""
    if is_bucket(directory):
        bucket, _, path = directory.removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}
    return {"driver": "file", "path": f"{Path(directory).resolve()}/"}  # which refuses ".."


def read(directory: str, name: str) -> bytes | None:
    """Returns the content of a file, or None where there is none.

    Raises:
      UserError: the directory cannot be reached.
    """
    found = attempt(directory, lambda: _open(directory).read(name).result())
    return found.value if found.state == "value" else None


def write(directory: str, name: str, content: bytes) -> None:
    """Writes a file; it appears when whole.

    Raises:
      UserError: it cannot be written.
    """
    attempt(directory, lambda: _open(directory).write(name, content).result())


def names(directory: str) -> list[str]:
    """Returns the paths of all files below a directory; none where there is no such directory.

    Raises:
      UserError: the directory cannot be reached.
    """
    if not is_bucket(directory) and not Path(directory).is_dir():
        return []
    return [key.decode() for key in attempt(directory, lambda: _open(directory).list().result())]


def attempt(what: str, action: Callable[[], T]) -> T:
    """Returns what `action` returns.

    Raises:
      UserError: TensorStore could not do it. The sentence begins with `what`.
    """
    try:
        return action()
    except (ValueError, OSError) as error:
        # Without the code before the message and, in brackets after it, the whole specification.
        reason = words_of_system(error) or re.sub(r"^[A-Z_]+: ", "", str(error)).partition(" [")[0]
        raise UserError(f"{what}: {reason:.400}") from error


def words_of_system(error: BaseException) -> str | None:
    """Returns the system's own words of an error of TensorStore, which tells its number; None without one."""
    told = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    return os.strerror(int(told[1])).lower() if told else None


def zarr(directory: str) -> dict[str, Any]:
    """Returns the specification of the zarr array in a directory."""
    # Without the last setting a chunk whose file is missing would be read as zeros.
    return {"driver": "zarr", "kvstore": spec(directory), "fill_missing_data_reads": False}


def open_arrays(
    where: str, specs: Mapping[str, dict[str, Any]], sums: Mapping[str, int] | None = None
) -> dict[str, LazyArray]:
    """Opens arrays, all at the same time; their content is read when it is asked for.

    16-bit integers are taken for bfloat16, which some programs store so.

    Args:
      where: what messages call the place.
      specs: TensorStore's specification of each array, by name.
      sums: the checksum of each array (see `array_checksums`), compared once all of it has been read; None
        for arrays that were written without.

    Raises:
      UserError: one is missing or damaged; so does reading from what is returned.
    """
    if sums is not None:
        array_checksums.check_names(where, sums, specs)
    context = tensorstore.Context(_CONTEXT)
    opening = {n: tensorstore.open(s, open=True, read=True, context=context) for n, s in specs.items()}

    def lazy(name: str) -> LazyArray:
        store = attempt(f"{where}: {name}", opening[name].result)
        reading = sums and array_checksums.Reading(f"{where}: {name}", store.shape, sums[name])

        def read(index: Index) -> np.ndarray:
            value = attempt(f"{where}: {name}", lambda: store[index].read().result())
            if reading:
                reading.add(index, value)
            return value.view(ml_dtypes.bfloat16) if value.dtype == np.uint16 else value

        return LazyArray(store.shape, read)

    return {name: lazy(name) for name in specs}


def orbax_specs(directory: str, content: bytes) -> dict[tuple[str, ...], dict[str, Any]]:
    """Returns the specification of each array that Orbax wrote into a directory, by its keys in the tree.

    Args:
      directory: the directory.
      content: of its file `ORBAX_INDEX`.

    Raises:
      UserError: the content is not what Orbax writes.
    """
    try:
        described = json.loads(content)
        entries = [
            tuple(str(key["key"]) for key in entry["key_metadata"])
            for entry in described["tree_metadata"].values()
            if entry["value_metadata"]["value_type"] != "None"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{directory}/{ORBAX_INDEX}: not what Orbax writes ({error!r:.100})") from error
    driver = {"driver": "zarr3" if described.get("use_zarr3") else "zarr"}
    place = orbax_places(directory)
    return {keys: place(".".join(keys)) | driver for keys in entries}


def orbax_places(directory: str) -> Callable[[str], dict[str, Any]]:
    """Returns what gives the specification of the array of a name that Orbax wrote into a directory."""
    if read(directory, _ORBAX_MANIFEST) is None:
        return lambda name: zarr(inside(directory, name, said_by=f"{directory}'s index"))
    base = f"{directory}/" if is_bucket(directory) else f"file://{Path(directory).resolve()}/"
    return lambda name: zarr(directory) | {"kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}


def _open(directory: str) -> tensorstore.KvStore:
    return tensorstore.KvStore.open(spec(directory), context=tensorstore.Context(_CONTEXT)).result()
