"""Holds out dev and test pairs; pairs that share a query or a passage stay in one split."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.formats.sources import folded

# By default a split has 5 % of the queries, but at least 100 (or 10 %, if fewer) and at most AT_MOST.
SHARE, AT_LEAST, AT_LEAST_SHARE = 0.05, 100, 0.1
AT_MOST = {"dev": 1_000, "test": 2_000}
TRAIN = 0


def group_key(text: str, seed: int) -> int:
    """Returns 63 bits of a hash of a text, which ignores case and repeated white space."""
    digest = hashlib.blake2b(folded(text).encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") >> 1


class HeldOut(NamedTuple):
    """The assignment of P pairs to splits.

    Attributes:
      split: int8 [P], the split of each pair: 0 is training, n is the split `names[n - 1]`.
      names: names of the held-out splits.
      wanted: requested number of queries per held-out split.
      largest: number of queries in the largest group.
    """

    split: np.ndarray
    names: list[str]
    wanted: list[int]
    largest: int


def hold_out(
    queries: np.ndarray, query_keys: np.ndarray, passage_keys: np.ndarray, sizes: Mapping[str, float | None]
) -> HeldOut:
    """Decides which pairs are for training and which are held out.

    Pairs that share a query or a passage, directly or through other pairs, form a group. A group is never
    divided, so no text is positive in two splits. Groups are taken in the order of their smallest query key,
    so the order of the pairs does not matter and additional pairs change little. A group with more queries
    than a split still needs stays in training.

    Args:
      queries: int64 [P], a number for each distinct query.
      query_keys: int64 [P], from `group_key`.
      passage_keys: int64 [P], from `group_key`.
      sizes: {split: number of queries, share of the queries below 1, 0, or None for a default}; the first
          split gets its groups first.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    keys, key_rows = np.unique(query_keys, return_inverse=True)
    passages, passage_rows = np.unique(passage_keys, return_inverse=True)
    nodes = len(keys) + len(passages)
    edges = coo_array(
        (np.ones(len(key_rows), np.int8), (key_rows, passage_rows + len(keys))), shape=(nodes, nodes)
    )
    group = connected_components(edges, directed=False)[1][: len(keys)]  # the group of each query key
    # `keys` is sorted, so the first key of a group is its smallest.
    members, first = np.unique(group, return_index=True)
    order = members[np.argsort(first)]
    _, row = np.unique(queries, return_index=True)
    total, counts = len(row), np.bincount(group[key_rows[row]], minlength=len(members))

    wanted = {name: _size(name, size, total) for name, size in sizes.items()}
    wanted = {name: size for name, size in wanted.items() if size}
    if sum(wanted.values()) >= total:
        requested = " and ".join(f"{size:,} for {name}" for name, size in wanted.items())
        raise UserError(
            f"{requested} would be held out of {total:,} distinct queries, so none would remain to train on:"
            " give smaller --dev= and --test="
        )
    split_of_group = np.zeros(len(members), np.int8)
    remaining = iter(order)
    for number, (name, size) in enumerate(wanted.items(), 1):
        lacking = size
        passed = []
        while lacking and (found := next(remaining, None)) is not None:
            if counts[found] > lacking:
                passed.append(found)
                continue
            split_of_group[found] = number
            lacking -= counts[found]
        if lacking == size:
            raise UserError(
                f"no {name} queries can be held out: the smallest groups of queries that share passages are"
                f" larger than the {size:,} requested; give a larger --{name}=, or 0 for no such split"
            )
        remaining = iter([*passed, *remaining])
    if not np.any(split_of_group == TRAIN):
        raise UserError("no pair would remain to train on: hold out fewer queries with --dev= and --test=")
    return HeldOut(split_of_group[group][key_rows], list(wanted), list(wanted.values()), int(counts.max()))


def _size(name: str, size: float | None, total: int) -> int:
    if size is None:
        few = min(AT_LEAST, math.floor(AT_LEAST_SHARE * total))
        return max(1, min(AT_MOST.get(name, total), max(math.floor(SHARE * total), few)))
    if size < 0 or (size >= 1 and size != int(size)):
        raise UserError(f"--{name} must be a number of queries, or a share (below 1) of them, not {size:g}")
    return int(size) if size >= 1 else math.ceil(size * total)
