"""Reads and writes T5X's checkpoints: a msgpack index beside one zarr directory for each large array.

`checkpoint_STEP/checkpoint` is the index: `{version, optimizer: {target, state: {step, param_states}}}`. Each
leaf is an array or the TensorStore specification of one, whose path is relative to the checkpoint. Version 2
stores bfloat16 as 16-bit integers, version 3 under its own name. Since 2023 T5X can write Orbax's layout
instead: `checkpoint_STEP/state/` with `target` and `state`.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import serialization
from flax.traverse_util import unflatten_dict

from jaxir.core.errors import UserError
from jaxir.interop.weights import stores
from jaxir.interop.weights.lazy import LazyArray
from jaxir.storage.checksums import check
from jaxir.storage.files import atomic_file, check_bucket, inside, is_bucket, path_of

VERSION = 3
INDEX = "checkpoint"
_PLACEHOLDER = "PLACEHOLDER://"  # prefix of the text that replaces, in the index, an array of its own file
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")
_CHUNK_BYTES = 64 * 1024 * 1024  # maximum size of a chunk of a zarr array
_SLOTS = ("m", "v", "v_col", "v_row")


class ExternalArray(NamedTuple):
    """An array outside the index: TensorStore's specification, and the shape in the index, if any."""

    spec: dict[str, Any]
    shape: tuple[int, ...] | None = None


class Checkpoint(NamedTuple):
    """A checkpoint's directory, and its arrays by path ("encoder/layers_0/mlp/wo/kernel")."""

    where: Path
    leaves: dict[str, np.ndarray | ExternalArray]

    def open(self, paths: Collection[str]) -> dict[str, np.ndarray | LazyArray]:
        """Opens arrays by path."""
        leaves = {path: self.leaves[path] for path in paths}
        external = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, ExternalArray)}
        opened = stores.open_arrays(str(self.where), {path: leaf.spec for path, leaf in external.items()})
        for path, leaf in external.items():
            if leaf.shape not in (None, opened[path].shape):
                raise UserError(
                    f"{self.where} is damaged: {path} has shape {opened[path].shape}, not {leaf.shape}; copy"
                    " it again"
                )
        return {p: opened[p] if p in opened else np.asarray(v, np.float32) for p, v in leaves.items()}


def find(directory: str) -> Checkpoint:
    """Finds a checkpoint: `directory` itself, or a run's newest; a local path or gs://BUCKET/PATH."""
    place = local_or_bucket(directory)
    check_bucket(place)
    if place.name == INDEX and place.is_file():
        place = place.parent
    for where in (place, *_newest_first(place)):
        if (found := _read(where)) is not None:
            return found
    if is_bucket(place) or place.is_dir():
        raise UserError(
            f"{place}: no T5X checkpoint in it (no {INDEX}, no checkpoint_STEP); give another directory"
        )
    raise UserError(f"{place}: no such directory; correct the path")


def local_or_bucket(place: str | Path) -> Path:
    """Like `files.path_of`, but expands ~ in a local path."""
    path = path_of(place)
    return path if is_bucket(path) else path.expanduser()


def _newest_first(run: Path) -> list[Path]:
    """Returns the directories in a run that are named as checkpoints; some may be unfinished."""
    names = [path.name for path in run.iterdir()] if run.is_dir() else []
    steps = {name: int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))}
    return [run / name for name in sorted(steps, key=steps.__getitem__, reverse=True)]


def _read(directory: Path) -> Checkpoint | None:
    for where in (directory, directory / "state"):
        specs, content = stores.orbax_specs(where), stores.read(where / INDEX)
        if specs is not None:
            leaves = {"/".join(k[1:]): ExternalArray(s) for k, s in specs.items() if k[0] == "target"}
        elif content is not None and where == directory:
            return _read_native(where, content)
        elif content is not None:
            leaves = _read_placeholders(where, content)
        else:
            continue
        if not leaves:
            raise UserError(f"{where}: it holds no model (no target); copy it again")
        return Checkpoint(where, leaves)
    return None


def _read_native(where: Path, content: bytes) -> Checkpoint:
    if not is_bucket(where):
        check(where, may_grow=True)
    tree = _unpack(where, content)
    version = tree.get("version")
    if version not in (2, VERSION) or not isinstance(tree.get("optimizer"), dict):
        raise UserError(
            f"{where}/{INDEX}: not a T5X index of version 2 or {VERSION} (its version is {version}); restore"
            " and save it with a newer T5X"
        )
    target = tree["optimizer"].get("target")
    if not isinstance(target, dict):
        raise UserError(f"{where}/{INDEX}: it holds no model (no optimizer/target); copy it again")
    return Checkpoint(where, {path: _native_leaf(where, path, leaf) for path, leaf in _flatten(target)})


def _native_leaf(where: Path, path: str, leaf: Any) -> np.ndarray | ExternalArray:
    if isinstance(leaf, np.ndarray):
        return leaf
    try:
        # Take the array beside the index, even if it was written elsewhere (driver "gfile", another bucket).
        name = leaf["kvstore"].get("path") or leaf["path"]
        shape = (leaf.get("metadata") or {}).get("shape")
        place = inside(where, name.rstrip("/"), said_by=f"{where}/{INDEX}")
        return ExternalArray(stores.zarr(place), None if shape is None else tuple(shape))
    except (AttributeError, KeyError, TypeError):
        raise UserError(
            f"{where}/{INDEX}: {path} is not an array of T5X ({leaf!r:.80}); copy it again"
        ) from None


def _read_placeholders(where: Path, content: bytes) -> dict[str, np.ndarray | ExternalArray]:
    """Reads the index of Orbax's first layout: arrays, or placeholders for arrays beside the index."""
    target, place = _unpack(where, content).get("target"), stores.orbax_places(where)
    leaves = dict(_flatten(target if isinstance(target, dict) else {}))
    names = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, str)}
    return leaves | {p: ExternalArray(place(name.removeprefix(_PLACEHOLDER))) for p, name in names.items()}


def _unpack(where: Path, content: bytes) -> dict[str, Any]:
    if content.startswith(b"model_checkpoint_path"):
        raise UserError(f"{where}: a TensorFlow checkpoint; convert it with T5X's convert_tf_checkpoint")
    try:
        tree = serialization.msgpack_restore(content)
    except Exception as error:  # msgpack, numpy and struct raise many types of errors for damaged files
        raise UserError(
            f"{where}/{INDEX}: truncated, or not msgpack ({error!r:.100}); copy it again"
        ) from error
    if not isinstance(tree, dict):
        raise UserError(f"{where}/{INDEX}: not an index of T5X; copy it again")
    return tree


def _flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and not ("driver" in value and "kvstore" in value):
            yield from _flatten(value, f"{above}{name}/")
        elif value is not None:
            yield f"{above}{name}", value


def write(
    directory: str | Path,
    step: int,
    target: Mapping[str, Any],
    *,
    external: Collection[str],
    slots: Mapping[str, Mapping[str, np.ndarray]] | None = None,
) -> None:
    """Writes a checkpoint of version 3 into a new directory, local or in a bucket; the index last.

    Args:
      target: float32 arrays by path; lazy arrays are read one at a time.
      external: the paths whose arrays become zarr directories; the others are stored in the index.
      slots: Adafactor's state: for each path, float32 arrays by slot (m, v, v_col, v_row); a missing slot is
        unused. None omits the optimizer's state: T5X then restores only the parameters.
    """
    leaves = {
        path: _write_zarr(directory, path, value) if path in external else np.asarray(value, np.float32)
        for path, value in target.items()
    }
    state: dict[str, Any] = {"step": np.asarray(step, np.int32)}
    if slots is not None:
        unused = np.zeros((1,), np.float32)
        states = {f"{p}/{s}": slots[p].get(s, unused) for p in target for s in _SLOTS}
        state["param_states"] = unflatten_dict(states, sep="/")
    optimizer = {"target": unflatten_dict(leaves, sep="/"), "state": state}
    content = serialization.msgpack_serialize({"version": VERSION, "optimizer": optimizer})
    with atomic_file(path_of(directory) / INDEX, "wb") as file:
        file.write(content)


def _write_zarr(directory: str | Path, path: str, value: Any) -> dict[str, Any]:
    """Writes one array; returns the array's specification for the index."""
    import tensorstore

    name, value = f"target.{path.replace('/', '.')}", np.ascontiguousarray(value, np.float32)
    metadata = {
        "chunks": _chunks(value.shape, value.itemsize),
        "compressor": {"id": "gzip", "level": 1},
        "shape": list(value.shape),
    }
    described = {"driver": "zarr", "dtype": "float32", "metadata": metadata}
    place = described | {"kvstore": stores.spec(f"{directory}/{name}")}
    stores.attempt(
        f"{directory}/{name} cannot be written",
        lambda: tensorstore.open(place, create=True).result().write(value).result(),
    )
    # T5X replaces the name of the bucket when it restores.
    bucket = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
    store = bucket if is_bucket(directory) else {"driver": "file"}
    return described | {"kvstore": store | {"path": f"{name}/"}}


def _chunks(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Divides the longest dimension by its smallest divisor until a chunk has at most 64 MiB."""
    chunks = list(shape)
    while math.prod(chunks) * itemsize > _CHUNK_BYTES:
        axis = chunks.index(max(chunks))
        chunks[axis] //= next(d for d in range(2, chunks[axis] + 1) if chunks[axis] % d == 0)
    return chunks
