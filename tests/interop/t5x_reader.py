"""Reads T5X checkpoints of version 3 with msgpack, gzip and numpy alone."""

import gzip
import json
from pathlib import Path

import msgpack
import numpy as np


def load(checkpoint: Path) -> dict[str, np.ndarray]:
    content = msgpack.unpackb((checkpoint / "checkpoint").read_bytes())
    assert set(content) == {"version", "optimizer"} and content["version"] == 3
    found = {}

    def walk(node, path):
        if isinstance(node, msgpack.ExtType):
            shape, dtype, data = msgpack.unpackb(node.data)
            found[path] = np.frombuffer(data, dtype).reshape(shape)
        elif "kvstore" in node:
            found[path] = chunks_of(checkpoint, path, node)
        else:
            for name, child in node.items():
                walk(child, f"{path}/{name}".lstrip("/"))

    walk(content["optimizer"]["target"], "")
    return found


def chunks_of(checkpoint: Path, path: str, spec: dict) -> np.ndarray:
    name = f"target.{path.replace('/', '.')}"
    metadata = spec.pop("metadata")
    kvstore = {"driver": "file", "path": f"{name}/"}
    assert spec == {"driver": "zarr", "dtype": "float32", "kvstore": kvstore}
    assert set(metadata) == {"chunks", "compressor", "shape"}, "T5X takes chunks and compressor out of it"
    array = json.loads((checkpoint / name / ".zarray").read_text())
    assert (array["order"], array["dtype"], array["filters"]) == ("C", "<f4", None)
    assert [array[k] for k in sorted(metadata)] == [metadata[k] for k in sorted(metadata)]
    value, (rows, columns) = np.full(array["shape"], np.nan, np.float32), array["chunks"]
    assert value.shape[0] % rows == value.shape[1] % columns == 0
    for i in range(value.shape[0] // rows):
        for j in range(value.shape[1] // columns):
            data = gzip.decompress((checkpoint / name / f"{i}.{j}").read_bytes())
            part = np.frombuffer(data, np.float32).reshape(rows, columns)
            value[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = part
    return value
