"""The files of a ScaNN index: checks them before ScaNN opens them, and reads their vectors."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.outliers import Outliers
from jaxir.retrieval.indexes.residuals import Residuals
from jaxir.storage.files import inside
from jaxir.storage.npy import pieces

Storage = Literal["float32", "bfloat16", "int8"]
ASSETS = "scann"
BLOCK = 16_384  # vectors converted at a time


def check_assets(directory: Path) -> None:
    """Raises a UserError if ScaNN's list of files names a file elsewhere, or was not written by ScaNN."""
    path = directory / "scann_assets.pbtxt"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not re.fullmatch(r'(assets \{\s*asset_type: \w+\s*asset_path: "[\w./-]*"\s*\}\s*)*', text):
        raise UserError(f"{path} is damaged: ScaNN did not write it; build the index again")
    for name in re.findall(r'asset_path: "(.*)"', text):
        inside(directory, name, said_by=path)


@contextlib.contextmanager
def stored_vectors(
    directory: Path, storage: Storage, outliers: Outliers | None = None, residuals: Residuals | None = None
) -> Iterator[np.ndarray]:
    """Yields the float32 vectors [N, D] of a saved index, memory-mapped, in the order of its ids."""
    multipliers = None
    if storage == "int8":
        stored, multipliers = int8_vectors(directory / ASSETS)
    else:
        name = "dataset.npy" if storage == "float32" else "bfloat16_dataset.npy"
        stored = np.load(directory / ASSETS / name, mmap_mode="r")
    if storage == "float32" and not outliers:
        yield stored
        return
    with tempfile.TemporaryFile(dir=directory if os.access(directory, os.W_OK) else None) as file:
        start = 0
        for part in pieces([stored], BLOCK):
            if multipliers is not None:
                vectors = part / multipliers
                if residuals:
                    vectors += residuals.decoded(start, start + len(part))
            elif storage == "bfloat16":  # a bfloat16's bits are the upper half of a float32
                vectors = (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                vectors = part
            if outliers:
                vectors = outliers.restored(vectors, start)
            file.write(np.ascontiguousarray(vectors, np.float32).data)
            start += len(part)
        file.flush()
        yield np.memmap(file, np.float32, "r", shape=stored.shape)


def int8_vectors(assets: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns ScaNN's int8 vectors [N, D], memory-mapped, and the multipliers [D] that scaled them."""
    return np.load(assets / "int8_dataset.npy", mmap_mode="r"), np.load(assets / "int8_multipliers.npy")
