"""The files that transformers' Flax models were saved to: msgpack, as flax.serialization writes it.

A file is read whole, and its arrays stay in memory as long as they are in use. Names and layouts become those
of torch, by the rules that transformers itself converts by.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization

from jaxir.core.errors import UserError
from jaxir.interop.weights import lazy
from jaxir.interop.weights.lazy import LazyArray

# The last part of a name: Flax's, torch's. Kernels are transposed too.
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}


def open_file(path: Path) -> dict[str, LazyArray]:
    """Returns the arrays of a tree by path ("encoder/block/0/layer/0/SelfAttention/q/kernel").

    Raises:
      UserError: it is damaged, or something else.
      FileNotFoundError: there is none.
    """
    content = path.read_bytes()
    try:
        tree = serialization.msgpack_restore(content)
        return {name: lazy.in_memory(path, array) for name, array in _leaves(tree)}
    except Exception as error:  # msgpack's own, numpy's, flax's: all mean the same here
        reason = f"{type(error).__name__} {' '.join(str(error).split())}".strip()
        raise UserError(
            f"{path}: truncated or not what Flax writes of a model's parameters ({reason!s:.100})"
        ) from error


def to_torch(tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns the arrays by the names that they have in torch, laid out as there."""
    renamed = {}
    for path, value in tensors.items():
        *above, leaf = path.split("/")
        renamed[".".join([*above, _LEAVES.get(leaf, leaf)])] = value.T if leaf == "kernel" else value
    return renamed


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in tree.items():
        if not name.isprintable():
            raise ValueError("a name that cannot be printed")
        if isinstance(value, np.ndarray | np.generic):
            yield f"{above}{name}", np.asarray(value)
        elif isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}/")
        elif value is not None:
            raise ValueError(f"{above}{name} is no array")
