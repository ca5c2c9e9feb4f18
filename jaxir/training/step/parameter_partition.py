"""Selects the trained parameters of a model and of its objective's auxiliary, in trees by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import traverse_util

from jaxir.core.errors import UserError, suggest

AUXILIARY = "auxiliary"
Tree = Mapping[str, Any]


def joined(params: Tree, auxiliary: Tree) -> Tree:
    """Returns the model's and the auxiliary's parameters as one tree, the latter named "auxiliary.NAME"."""
    return {**params, AUXILIARY: auxiliary} if auxiliary else params


def apart(tree: Tree) -> tuple[Tree, Tree]:
    """Undoes `joined`: returns the model's parameters and the auxiliary's."""
    params = dict(tree)
    auxiliary = params.pop(AUXILIARY, {})
    return params, auxiliary


def select(tree: Tree, wanted: Callable[[str], bool]) -> Tree:
    """Returns the part of a tree for whose names `wanted` returns true."""
    flat = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict({path: x for path, x in flat.items() if wanted(name_of(path))})


def united(tree: Tree, other: Tree) -> Tree:
    """Merges two trees that have no name in common."""
    return traverse_util.unflatten_dict(traverse_util.flatten_dict(tree) | traverse_util.flatten_dict(other))


def name_of(path: Sequence[Any]) -> str:
    """Returns a dotted name such as encoder.layers.0.attention.query.kernel."""
    return ".".join(map(str, path))


def frozen_names(tree: Tree, patterns: Sequence[str]) -> frozenset[str]:
    """Returns the names of a tree that match one of the patterns, such as `encoder.embedding.*`."""
    names = [name_of(path) for path in traverse_util.flatten_dict(tree)]
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise UserError(f"frozen: no parameter matches {pattern!r}{suggest(pattern, names)}")
        found.update(matching)
    if len(found) == len(names):
        raise UserError("frozen matches all parameters, so there is nothing to train: give fewer patterns")
    return frozenset(found)
