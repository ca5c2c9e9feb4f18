"""T5X's checkpoint format: a msgpack index beside one zarr directory for each large array.

`checkpoint_STEP/checkpoint` is the index: `{version, optimizer: {target, state: {step, param_states}}}`. Each
leaf is an array or the TensorStore specification of one, whose path is relative to the checkpoint. In version
2 bfloat16 is stored as 16-bit integers, in version 3 under its own name. Since 2023 T5X can write Orbax's
layout instead: `checkpoint_STEP/state/` with `target` and `state`.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore
from flax import serialization

from jaxir.core.errors import UserError
from jaxir.interop.model.stored import nest
from jaxir.interop.weights import stores
from jaxir.interop.weights.lazy import LazyArray
from jaxir.storage.checksums import check
from jaxir.storage.files import inside

VERSION = 3
INDEX = "checkpoint"
_PLACEHOLDER = "PLACEHOLDER://"
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")
_CHUNK_BYTES = 64 * 1024 * 1024
_SLOTS = ("m", "v", "v_col", "v_row")


class Outside(NamedTuple):
    """An array outside the index.

    Attributes:
      spec: TensorStore's specification of it.
      shape: the shape that the index says; None where it says none.
    """

    spec: dict[str, Any]
    shape: tuple[int, ...] | None = None


class Checkpoint(NamedTuple):
    """A checkpoint that was found; of its arrays only those in the index are in memory.

    Attributes:
      where: its directory.
      leaves: each array of the model by path ("encoder/layers_0/mlp/wo/kernel").
    """

    where: str
    leaves: dict[str, np.ndarray | Outside]

    def open(self, paths: Collection[str]) -> dict[str, np.ndarray | LazyArray]:
        """Opens arrays by path.

        Raises:
          UserError: one is missing or not of the shape that the index says.
        """
        leaves = {path: self.leaves[path] for path in paths}
        outside = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Outside)}
        opened = stores.open_arrays(self.where, {path: leaf.spec for path, leaf in outside.items()})
        for path, leaf in outside.items():
            if leaf.shape not in (None, opened[path].shape):
                raise UserError(
                    f"{self.where}: {path} has shape {opened[path].shape}, the index says {leaf.shape}"
                )
        return {p: opened[p] if p in opened else np.asarray(v, np.float32) for p, v in leaves.items()}


def find(directory: str) -> Checkpoint:
    """Finds a checkpoint: `directory` itself, or the newest of the run that is there.

    Args:
      directory: a local path or gs://BUCKET/PATH; `checkpoint_STEP` or what holds several of them.

    Raises:
      UserError: there is none, it cannot be reached, or its index is damaged.
    """
    directory = stores.tidy(directory)
    if directory.endswith(f"/{INDEX}") and (stores.is_bucket(directory) or Path(directory).is_file()):
        directory = directory.removesuffix(f"/{INDEX}")
    for where in (directory, *_newest_first(directory)):
        found = _read(where)
        if found is not None:
            return found
    if stores.is_bucket(directory) or Path(directory).is_dir():
        raise UserError(f"{directory}: no T5X checkpoint in it (no {INDEX}, no checkpoint_STEP)")
    raise UserError(f"{directory}: no such directory")


def _newest_first(run: str) -> list[str]:
    """Returns the directories in a run that have the name of a checkpoint; some may be unfinished."""
    if stores.is_bucket(run):
        names = {name.partition("/")[0] for name in stores.names(run)}
    else:
        names = {path.name for path in Path(run).glob("checkpoint_*")}
    steps = {name: int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))}
    return [f"{run}/{name}" for name in sorted(steps, key=steps.__getitem__, reverse=True)]


def _read(directory: str) -> Checkpoint | None:
    for where in (directory, f"{directory}/state"):
        orbax, content = stores.read(where, stores.ORBAX_INDEX), stores.read(where, INDEX)
        if orbax is not None:
            specs = stores.orbax_specs(where, orbax)
            leaves = {"/".join(k[1:]): Outside(s) for k, s in specs.items() if k[0] == "target"}
        elif content is not None and where == directory:
            return _read_native(where, content)
        elif content is not None:
            leaves = _read_placeholders(where, content)
        else:
            continue
        if not leaves:
            raise UserError(f"{where}: it holds no model (no target)")
        return Checkpoint(where, leaves)
    return None


def _read_native(where: str, content: bytes) -> Checkpoint:
    if not stores.is_bucket(where):
        check(Path(where), may_grow=True)
    tree = _unpack(where, content)
    version = tree.get("version")
    if version not in (2, VERSION) or not isinstance(tree.get("optimizer"), dict):
        said = "none" if version is None else version
        raise UserError(f"{where}/{INDEX}: not a T5X index of version 2 or {VERSION} (its version: {said})")
    target = tree["optimizer"].get("target")
    if not isinstance(target, dict):
        raise UserError(f"{where}/{INDEX}: it holds no model (no optimizer/target)")
    return Checkpoint(where, {path: _native_leaf(where, path, leaf) for path, leaf in _flatten(target)})


def _native_leaf(where: str, path: str, leaf: Any) -> np.ndarray | Outside:
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, dict) and leaf.get("driver") == "zarr" and isinstance(leaf.get("kvstore"), dict):
        beside = leaf["kvstore"].get("path") or leaf.get("path")
        if isinstance(beside, str):
            # Where it was written (driver "gfile", another bucket) does not matter: it lies beside the index.
            metadata = leaf.get("metadata")
            shape = metadata.get("shape") if isinstance(metadata, dict) else None
            if not isinstance(shape, list | tuple | None):
                raise UserError(f"{where}/{INDEX}: {path} has no shape but {shape!r:.80}")
            place = inside(where, beside.rstrip("/"), said_by=f"{where}/{INDEX}")
            return Outside(stores.zarr(place), None if shape is None else tuple(shape))
    raise UserError(f"{where}/{INDEX}: {path} is neither an array nor what T5X writes of one ({leaf!r:.80})")


def _read_placeholders(where: str, content: bytes) -> dict[str, np.ndarray | Outside]:
    """Reads the index of Orbax's first layout: arrays, or placeholders for what lies beside it."""
    target, place = _unpack(where, content).get("target"), stores.orbax_places(where)
    return {
        path: Outside(place(leaf.removeprefix(_PLACEHOLDER))) if isinstance(leaf, str) else np.asarray(leaf)
        for path, leaf in _flatten(target if isinstance(target, dict) else {})
    }


def _unpack(where: str, content: bytes) -> dict[str, Any]:
    if content.startswith(b"model_checkpoint_path"):
        raise UserError(
            f"{where}: a TensorFlow checkpoint; T5X's convert_tf_checkpoint makes a native one of it"
        )
    try:
        tree = serialization.msgpack_restore(content)
    except Exception as error:  # msgpack's own, numpy's, struct's, ...: all mean the same here
        raise UserError(f"{where}/{INDEX}: truncated or not msgpack ({error!r:.100})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{where}/{INDEX}: not an index of T5X")
    return tree


def _flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and not ("driver" in value and "kvstore" in value):
            yield from _flatten(value, f"{above}{name}/")
        elif value is not None:
            yield f"{above}{name}", value


def write(
    directory: str,
    step: int,
    target: Mapping[str, Any],
    *,
    beside: Collection[str],
    slots: Mapping[str, Mapping[str, np.ndarray]] | None = None,
) -> None:
    """Writes a checkpoint of version 3, the index last.

    Args:
      directory: an empty or new one, `checkpoint_STEP` by T5X's convention; a local path or gs://BUCKET/PATH.
      step: the number of finished steps.
      target: float32 arrays by path; those that are at rest are read one at a time.
      beside: the paths whose arrays become zarr directories; the others stand in the index.
      slots: Adafactor's slots of each path, any of m, v, v_col and v_row, float32; the missing are unused.
        None leaves the optimizer's state out: T5X then restores the parameters alone.

    Raises:
      UserError: it cannot be written.
    """
    leaves = {
        path: _write_zarr(directory, path, value) if path in beside else np.asarray(value, np.float32)
        for path, value in target.items()
    }
    state: dict[str, Any] = {"step": np.asarray(step, np.int32)}
    if slots is not None:
        unused = np.zeros((1,), np.float32)
        state["param_states"] = nest(
            {f"{p}/{s}": slots[p].get(s, unused) for p in target for s in _SLOTS}, "/"
        )
    content = {"version": VERSION, "optimizer": {"target": nest(leaves, "/"), "state": state}}
    stores.write(directory, INDEX, serialization.msgpack_serialize(content))


def _write_zarr(directory: str, path: str, value: Any) -> dict[str, Any]:
    """Writes one array and returns the specification that the index holds of it."""
    name, value = f"target.{path.replace('/', '.')}", np.ascontiguousarray(value, np.float32)
    metadata = {
        "chunks": _chunks(value.shape, value.itemsize),
        "compressor": {"id": "gzip", "level": 1},
        "shape": list(value.shape),
    }
    described = {"driver": "zarr", "dtype": "float32", "metadata": metadata}
    place = described | {"kvstore": stores.spec(f"{directory}/{name}")}
    stores.attempt(
        f"{directory}/{name}", lambda: tensorstore.open(place, create=True).result().write(value).result()
    )
    # T5X puts the bucket's name in when it restores.
    bucket = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
    store = bucket if stores.is_bucket(directory) else {"driver": "file"}
    return described | {"kvstore": store | {"path": f"{name}/"}}


def _chunks(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Divides the longest dimension by its smallest divisor until a chunk has at most 64 MiB."""
    chunks = list(shape)
    while math.prod(chunks) * itemsize > _CHUNK_BYTES:
        axis = chunks.index(max(chunks))
        chunks[axis] //= next(d for d in range(2, chunks[axis] + 1) if chunks[axis] % d == 0)
    return chunks
