"""Traffic between chips, read from a compiled program."""

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
    """Identical collectives of one step."""

    kind: str  # one of `KINDS`
    axes: tuple[str, ...]  # the mesh axes that the collective crosses
    bytes: int  # size of the whole array that is gathered, reduced or moved
    count: int  # number of executions in a step
    group: int  # number of participating chips
    members: tuple[int, ...]  # positions in the mesh of the chips of one group
    arrays: tuple[Array, ...]  # the arrays that are gathered, reduced or moved
    source: str  # JAX's name of the operation that the collective comes from

    @property
    def types(self) -> str:
        """The arrays in XLA notation, such as "f32[512,768]"."""
        return " ".join(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in self.arrays)

    @property
    def traffic(self) -> float:
        """Bytes that each chip sends in a step, by ring algorithms (Thakur et al. 2005)."""
        share = (2.0 if self.kind == "all-reduce" else 1.0) * (self.group - 1) / self.group
        return self.count * self.bytes * (1.0 if self.kind == "collective-permute" else share)


def read(program: Program, mesh: Mesh) -> list[Collective]:
    """Returns the collectives of a step, largest traffic first, identical collectives merged.

    Partition i of the program is the i-th device of `mesh`.
    """
    counts: collections.Counter[Collective] = collections.Counter()
    for step in program.steps():
        for _, one in begun(program, step.instruction, mesh):
            counts[one] += step.times
    found = [one._replace(count=times) for one, times in counts.items()]
    return sorted(found, key=lambda c: -c.traffic)


def begun(program: Program, instruction: Instruction, mesh: Mesh) -> Iterator[tuple[Instruction, Collective]]:
    """Yields the collectives that an instruction starts by itself or as a fusion, each counted once."""
    kind = _kind(instruction)
    starts = [(instruction, kind)] if kind else []
    if instruction.op == "fusion":
        starts = _fused(program, instruction)
    for inner, kind in starts:
        groups = read_groups(inner.attributes, mesh.devices.size)
        members = tuple(groups[0])
        if len(members) < 2:
            continue
        arrays = _moved(program, inner)
        name = re.search(r'op_name="([^"]*)"', inner.attributes)
        collective = Collective(
            kind=kind,
            axes=crossed(groups, mesh),
            bytes=int(sum(a.bytes for a in arrays)),
            count=1,
            group=len(members),
            members=members,
            arrays=arrays,
            source=name[1] if name else "",
        )
        yield inner, collective


def read_groups(attributes: str, devices: int) -> list[list[int]]:
    """Returns the groups of partitions of a collective.

    XLA writes lists ("{{0,1},{2,3}}"), a reshaped and transposed range ("[2,2]<=[4]",
    "[4,2]<=[2,4]T(1,0)") or axes of a mesh ("mesh['a'=4,'b'=2] {'a'}").
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
    raise ValueError(f"the groups of a collective have an unknown format: {attributes:.200}")


def crossed(groups: Sequence[Sequence[int]], mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes along which members of a group differ."""
    shape = tuple(mesh.shape.values())
    varying: set[int] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group), shape), axis=1)
        varying |= set(np.flatnonzero((places != places[:1]).any(axis=0)).tolist())
    return tuple(name for i, name in enumerate(mesh.axis_names) if i in varying)


def _fused(program: Program, fusion: Instruction) -> Iterator[tuple[Instruction, str]]:
    """Yields the collectives that a fusion starts.

    libtpu hides a collective behind products: one fusion starts it, others continue it, one ends it.
    Each of them repeats the collective; only the start is counted.
    """
    inner = {i.name: i for i in program.inside(fusion)}
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
    """Returns the larger arrays of a collective: outputs of a gather, inputs of a reduction."""
    kind, arrays = _kind(instruction), instruction.arrays
    if instruction.op.endswith("-start") and kind in ("all-gather", "collective-permute"):
        # The result of an asynchronous start holds its inputs, its outputs, then counters.
        arrays = arrays[len(instruction.operands) : 2 * len(instruction.operands)]
    if kind == "reduce-scatter":
        arrays = tuple(a for name in instruction.operands for a in program.instructions[name].arrays)
    return tuple(a for a in arrays if a.dtype != "u32" or a.shape)


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
    """Returns the groups along axes such as "'a','b':(2)4": (2)4 is size 4, after a part of size 2."""
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
    """Returns the connected sets of (sender, receiver) pairs."""
    groups: list[set[int]] = []
    for pair in pairs:
        touching = [g for g in groups if not g.isdisjoint(pair)]
        groups = [g for g in groups if g not in touching] + [set(pair).union(*touching)]
    return sorted((sorted(g) for g in groups), key=len, reverse=True)
