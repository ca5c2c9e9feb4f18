"""Arrays in local or gs:// directories, through TensorStore."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.weights import array_checksums
from jaxir.interop.weights.lazy import Index, LazyArray
from jaxir.storage.files import inside, is_bucket
from jaxir.storage.open_files import open_to_read

T = TypeVar("T")

ORBAX_INDEX = "_METADATA"
_ORBAX_MANIFEST = "manifest.ocdbt"
# With a cache, a chunk that holds several requested parts is fetched and decompressed once.
_CONTEXT = {"cache_pool": {"total_bytes_limit": 1 << 28}, "gcs_request_retries": {"max_retries": 6}}


def spec(directory: str | Path) -> dict[str, Any]:
    """Returns TensorStore's specification of a directory as a key-value store."""
    if is_bucket(directory):
        bucket, _, path = str(directory).removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}
    # Resolved, because TensorStore refuses "..".
    return {"driver": "file", "path": f"{Path(directory).resolve()}/"}


def read(path: Path) -> bytes | None:
    """Returns the content of a file, local or in a bucket; None if there is no such file."""
    try:
        with open_to_read(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except Exception as error:  # OSError, or an error of gcsfs or aiohttp
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be read: {reason:.200}") from error


def attempt(what: str, action: Callable[[], T]) -> T:
    """Returns `action()`; turns an error of TensorStore into a UserError that begins with `what`."""
    try:
        return action()
    except (ValueError, OSError) as error:
        # The message begins with a status code and ends with the whole specification in brackets.
        reason = words_of_system(error) or re.sub(r"^[A-Z_]+: ", "", str(error)).partition(" [")[0]
        raise UserError(f"{what}: {reason:.400}") from error


def words_of_system(error: BaseException) -> str | None:
    """Returns the system's description of the errno in an error of TensorStore; None without an errno."""
    found = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    return os.strerror(int(found[1])).lower() if found else None


def zarr(directory: str | Path) -> dict[str, Any]:
    """Returns the specification of the zarr array in a directory."""
    # By default TensorStore reads zeros where the file of a chunk is missing.
    return {"driver": "zarr", "kvstore": spec(directory), "fill_missing_data_reads": False}


def open_arrays(
    where: str, specs: Mapping[str, dict[str, Any]], sums: Mapping[str, int] | None = None
) -> dict[str, LazyArray]:
    """Opens arrays concurrently; their content is read on demand.

    16-bit integers are read as bfloat16, which some programs store in this way.

    Args:
      where: the arrays' directory, with which error messages begin.
      specs: TensorStore's specification of each array, by name.
      sums: the checksum of each array (see `array_checksums`), compared once the array is completely read;
        None if the arrays were written without checksums.

    Raises:
      UserError: an array is missing or damaged; also raised by later reads.
    """
    import tensorstore

    if sums is not None and (differing := sorted({*sums} ^ {*specs})):
        raise UserError(
            f"{where} is damaged: arrays are missing or were added ({', '.join(differing[:3])}); copy it"
            " again, or make it again"
        )
    context = tensorstore.Context(_CONTEXT)
    opening = {n: tensorstore.open(s, open=True, read=True, context=context) for n, s in specs.items()}

    def lazy(name: str) -> LazyArray:
        store = attempt(f"{where}: {name} cannot be read", opening[name].result)
        reading = sums and array_checksums.Reading(f"{where}: {name}", store.shape, sums[name])

        def read(index: Index) -> np.ndarray:
            value = attempt(f"{where}: {name} cannot be read", lambda: store[index].read().result())
            if reading:
                reading.add(index, value)
            return value.view(ml_dtypes.bfloat16) if value.dtype == np.uint16 else value

        return LazyArray(store.shape, read)

    return {name: lazy(name) for name in specs}


def orbax_specs(directory: Path) -> dict[tuple[str, ...], dict[str, Any]] | None:
    """Returns the specification of each array that Orbax wrote, by its keys; None if there is no index."""
    content = read(directory / ORBAX_INDEX)
    if content is None:
        return None
    try:
        described = json.loads(content)
        entries = [
            tuple(str(key["key"]) for key in entry["key_metadata"])
            for entry in described["tree_metadata"].values()
            if entry["value_metadata"]["value_type"] != "None"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{directory}/{ORBAX_INDEX} is damaged: not Orbax's index ({error!r:.100}); copy it again"
        ) from error
    driver = {"driver": "zarr3" if described.get("use_zarr3") else "zarr"}
    place = orbax_places(directory)
    return {keys: place(".".join(keys)) | driver for keys in entries}


def orbax_places(directory: Path) -> Callable[[str], dict[str, Any]]:
    """Returns a function that maps an array's name to its specification, for a directory of Orbax."""
    if not (directory / _ORBAX_MANIFEST).exists():
        return lambda name: zarr(inside(directory, name, said_by=f"{directory}'s index"))
    base = f"{directory}/" if is_bucket(directory) else f"file://{directory.resolve()}/"
    return lambda name: zarr(directory) | {"kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
