"""The traffic between chips, read from a compiled program."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxir.costs.hlo import Array, Instruction, Program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """Equal collectives of one step.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes that it crosses.
      bytes: of the whole array it gathers, reduces or moves, once.
      count: how often it runs in a step.
      group: chips that take part in each.
      members: positions in the mesh of one group's chips.
      arrays: what it gathers, reduces or moves.
      source: where in the model it comes from, JAX's name of the operation.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    group: int
    members: tuple[int, ...]
    arrays: tuple[Array, ...]
    source: str

    @property
    def types(self) -> str:
        """The arrays as XLA writes them, such as "f32[512,768]"."""
        return " ".join(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in self.arrays)

    @property
    def traffic(self) -> float:
        """Bytes that each chip sends in a step, by the usual ring algorithms."""
        return self.count * self.bytes * _share(self.kind, self.group)


def read(program: Program, mesh: Mesh) -> list[Collective]:
    """Returns the collectives of a step, largest traffic first, equal ones together.

    Args:
      program: the compiled step.
      mesh: the mesh it was compiled for; partition i is the i-th device of it.
    """
    counts: collections.Counter[Collective] = collections.Counter()
    for step in program.steps():
        for _, one in begun(program, step.instruction, mesh):
            counts[one] += step.times
    found = [one._replace(count=times) for one, times in counts.items()]
    return sorted(found, key=lambda c: -c.traffic)


def begun(program: Program, instruction: Instruction, mesh: Mesh) -> Iterator[tuple[Instruction, Collective]]:
    """Yields the collectives that an instruction begins, by itself or fused into it, each to run once.

    Args:
      program: the compiled step.
      instruction: of any kind.
      mesh: see `read`.
    """
    for inner, kind in _kinds(program, instruction):
        groups = read_groups(inner.attributes, mesh.devices.size)
        members = tuple(groups[0])
        if len(members) < 2:
            continue
        arrays = _moved(program, inner)
        yield (
            inner,
            Collective(
                kind=kind,
                axes=crossed(groups, mesh),
                bytes=int(sum(a.bytes for a in arrays)),
                count=1,
                group=len(members),
                members=members,
                arrays=arrays,
                source=_source(inner),
            ),
        )


def read_groups(attributes: str, devices: int) -> list[list[int]]:
    """Returns the groups of partitions that take part together.

    XLA writes them as lists ("{{0,1},{2,3}}"), as a reshaped and transposed count ("[2,2]<=[4]",
    "[4,2]<=[2,4]T(1,0)") or as axes of a mesh ("mesh['a'=4,'b'=2] {'a'}").
    """
    if match := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        return _joined([int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", match[1]))
    if match := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        found = [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d,]*)\}", match[1])]
        return found or [list(range(devices))]
    if match := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _iota(match[1]).tolist()
    if match := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? ?\{([^}]*)\}", attributes
    ):
        names, sizes = zip(*re.findall(r"'([^']+)'=(\d+)", match[1]), strict=True)
        shape = [int(n) for n in sizes]
        ids = _ids(match[2], math.prod(shape)).reshape(shape)
        return _along(ids, list(names), match[3])
    raise ValueError(f"cannot read the groups of a collective: {attributes:.200}")


def crossed(groups: Sequence[Sequence[int]], mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes along which members of a group differ."""
    shape = tuple(mesh.shape.values())
    varying: set[int] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group), shape), axis=1)
        varying |= set(np.flatnonzero((places != places[:1]).any(axis=0)).tolist())
    return tuple(name for i, name in enumerate(mesh.axis_names) if i in varying)


def _kinds(program: Program, instruction: Instruction) -> Iterator[tuple[Instruction, str]]:
    kind = _kind(instruction)
    if kind is not None:
        yield instruction, kind
    elif instruction.op == "fusion":
        yield from _fused(program, instruction)


def _fused(program: Program, fusion: Instruction) -> Iterator[tuple[Instruction, str]]:
    """Yields the collectives that a fusion begins.

    A TPU hides a collective behind products: one fusion starts it, products carry it on, one ends it, and
    each of them shows the collective again. What is counted is its start.
    """
    inner = {i.name: i for _, i in program.inside(fusion)}
    started = {
        operand
        for i in inner.values()
        if i.op == "custom-call" and 'custom_call_target="AsyncCollectiveStart"' in i.attributes
        for operand in i.operands
    }
    for i in inner.values():
        kind = _kind(i)
        if kind is None or ("chain_id=" in i.attributes and i.name not in started):
            continue
        scattered = kind == "all-reduce" and "all-reduce-scatter" in fusion.attributes + fusion.name
        yield i, "reduce-scatter" if scattered else kind


def _kind(instruction: Instruction) -> str | None:
    op = instruction.op.removesuffix("-start")
    return op if op in KINDS else None


def _moved(program: Program, instruction: Instruction) -> tuple[Array, ...]:
    """Returns the arrays at their larger side: what a gather gives, what a reduction reads."""
    kind, arrays = _kind(instruction), instruction.arrays
    if instruction.op.endswith("-start") and kind in ("all-gather", "collective-permute"):
        # An asynchronous start gives its inputs, then its outputs (then counters).
        arrays = arrays[len(instruction.operands) : 2 * len(instruction.operands)]
    if kind == "reduce-scatter":
        arrays = tuple(a for name in instruction.operands for a in program.instructions[name].arrays)
    return tuple(a for a in arrays if a.dtype != "u32" or a.shape)


def _share(kind: str, group: int) -> float:
    """Bytes that each chip sends for each byte of the whole array (Thakur et al. 2005, ring algorithms)."""
    if kind == "collective-permute":
        return 1.0
    return (2.0 if kind == "all-reduce" else 1.0) * (group - 1) / group


def _source(instruction: Instruction) -> str:
    match = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return match[1] if match else ""


def _iota(text: str) -> np.ndarray:
    shape, count, order = re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text).groups()
    sizes = [int(n) for n in (count or shape).split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    if order:
        ids = ids.transpose([int(n) for n in order.split(",")])
    return ids.reshape([int(n) for n in shape.split(",")]) if count else ids


def _ids(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    return _iota(text) if text.startswith("[") else np.array([int(n) for n in text.split(",")])


def _along(ids: np.ndarray, names: list[str], wanted: str) -> list[list[int]]:
    """Returns the groups along axes such as "'a','b':(2)4" (the part of size 4 after one of size 2)."""
    shape, chosen = list(ids.shape), []
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", wanted):
        at = names.index(name)
        if before:
            parts = [int(before), int(size), shape[at] // (int(before) * int(size))]
            shape[at : at + 1] = parts
            names[at : at + 1] = [f"{name}<", name, f"{name}>"]
            at += 1
        chosen.append(at)
    ids = ids.reshape(shape)
    ids = np.moveaxis(ids, chosen, range(ids.ndim - len(chosen), ids.ndim))
    return ids.reshape(-1, math.prod(shape[at] for at in chosen)).tolist()


def _joined(pairs: Iterator[list[int]]) -> list[list[int]]:
    """Returns the sets that pairs of senders and receivers connect."""
    groups: list[set[int]] = []
    for pair in pairs:
        touching = [g for g in groups if not g.isdisjoint(pair)]
        groups = [g for g in groups if g not in touching] + [set(pair).union(*touching)]
    return sorted((sorted(g) for g in groups), key=len, reverse=True)
