"""Reads the collectives of a compiled program, independently of `jaxir.costs`."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(rf" = (.*?) ({'|'.join(KINDS)}|collective-broadcast)(-start)?\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array that a collective returns.

    Attributes:
      kind: such as all-gather.
      dtype: as XLA writes it: f32, s32, ...
      shape: the shape of the result on one device.
      axes: the mesh axes along which devices exchange it.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: frozenset[str]


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    found = []
    for line in text.splitlines():
        if match := _LINE.search(line):
            axes = _axes(_groups(line), mesh)
            for dtype, dims in _SHAPE.findall(match[1]):
                shape = tuple(int(n) for n in dims.split(",") if n)
                found.append(Collective(match[2], dtype, shape, axes))
    return found


def _groups(line: str) -> Iterator[list[int]]:
    """Yields the groups of devices that exchange, by their index in the mesh."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", line):
        for group in re.findall(r"\{([\d, ]+)\}", explicit[1]):
            yield [int(n) for n in group.split(",")]
        return
    named = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", line)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        along = re.findall(r"'(\w+)'", named[3])
        assert ":" not in named[3], f"cannot read a part of an axis: {line}"
        ids = _iota(named[2] or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
        order = sorted(range(len(sizes)), key=lambda i: list(sizes)[i] in along)
        yield from ids.transpose(order).reshape(-1, math.prod(sizes[n] for n in along)).tolist()
        return
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line)
    assert iota, f"cannot read the replica groups: {line}"
    yield from _iota(iota[2]).reshape([int(n) for n in iota[1].split(",")]).tolist()


def _iota(text: str) -> np.ndarray:
    """Parses [2,4]T(1,0): 0, 1, 2, ... in that shape, transposed, flattened."""
    match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert match, text
    dims = [int(n) for n in match[1].split(",")]
    order = [int(n) for n in match[2].split(",")] if match[2] else range(len(dims))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).ravel()


def _axes(groups: Iterator[list[int]], mesh: Mesh) -> frozenset[str]:
    axes = set()
    for group in groups:
        places = np.array(np.unravel_index(group, mesh.devices.shape))
        axes |= {name for name, place in zip(mesh.axis_names, places, strict=True) if len(set(place)) > 1}
    return frozenset(axes)
