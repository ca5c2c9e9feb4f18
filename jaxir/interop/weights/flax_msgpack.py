"""The files of transformers' Flax models: msgpack, as flax.serialization writes it.

A file is read completely, and its arrays stay in memory while they are used. Names and layouts are converted
to torch's by transformers' rules.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization

from jaxir.core.errors import UserError
from jaxir.interop.weights import lazy
from jaxir.interop.weights.lazy import LazyArray

# Maps the last part of a name in Flax to that in torch. Kernels are also transposed.
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}


def open_file(path: Path) -> dict[str, LazyArray]:
    """Returns the arrays of a file by path ("encoder/block/0/layer/0/SelfAttention/q/kernel")."""
    content = path.read_bytes()
    try:
        tree = serialization.msgpack_restore(content)
        return {name: lazy.in_memory(path, array) for name, array in _leaves(tree)}
    except Exception as error:  # msgpack, numpy and flax raise many types of errors for damaged files
        reason = f"{type(error).__name__} {' '.join(str(error).split())}".strip()
        raise UserError(f"{path}: truncated, or not a Flax model ({reason:.100}); copy it again") from error


def to_torch(tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns the arrays under torch's names and in torch's layout."""
    renamed = {}
    for path, value in tensors.items():
        *above, leaf = path.split("/")
        renamed[".".join([*above, _LEAVES.get(leaf, leaf)])] = value.T if leaf == "kernel" else value
    return renamed


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in tree.items():
        if isinstance(value, np.ndarray | np.generic):
            yield f"{above}{name}", np.asarray(value)
        elif isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}/")
        elif value is not None:
            raise ValueError(f"{above}{name} is not an array")
