"""Overlap of communication and computation, by following a compiled program in its order.

A TPU's program is a schedule. A collective with a start and a done instruction overlaps everything between
these two. The chip waits for any other collective.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxir.costs import collectives, roofline, work
from jaxir.costs.hlo import ASIDE, Instruction, Program
from jaxir.costs.targets import Target

# Asynchronous copies between HBM and the chip's own memory.
_COPIES = ("copy-start", "slice-start")
_DONE = 'custom_call_target="AsyncCollectiveDone"'


class Overlap(NamedTuple):
    """A step, timed in the order of its program."""

    # Duration. Each instruction takes the longest of its products, elementwise operations and HBM traffic at
    # full speed; waiting times are added.
    seconds: float
    hidden_seconds: float  # part of the collectives' time during which other work runs
    # Bytes that each chip sends during `hidden_seconds`, by kind of collective and mesh axes.
    hidden_bytes: Mapping[tuple[str, tuple[str, ...]], float]


class _Took(NamedTuple):
    """Seconds of a computation, and seconds during which HBM and the links to other chips are busy."""

    seconds: float
    memory: float
    links: float


@dataclasses.dataclass
class _Transfer:
    """A transfer in progress."""

    name: str  # the name that the end of the transfer refers to
    left: float  # remaining seconds
    carried: bool = False  # whether the transfer advances only during instructions that continue it
    hidden: float = 0.0  # seconds overlapped with other work


class _Queue:
    """The transfers of one resource, which run one after another in the order of their starts."""

    def __init__(self):
        self.transfers: dict[str, _Transfer] = {}  # transfers by name, in the order of their starts

    def spend(self, seconds: float, carrying: Collection[str] = ()) -> None:
        """Advances the transfers while other work runs."""
        for transfer in self.transfers.values():
            if transfer.carried and transfer.name not in carrying:
                continue
            moved = min(seconds, transfer.left)
            transfer.left -= moved
            transfer.hidden += moved
            seconds -= moved

    def wait(self, name: str) -> float:
        """Returns the seconds until a transfer, and all that started before it, have ended."""
        waited = 0.0
        for transfer in self.transfers.values():
            waited += transfer.left
            transfer.left = 0.0
            if transfer.name == name:
                break
        return waited


def read(program: Program, target: Target, mesh: Mesh, devices: Sequence[jax.Device]) -> Overlap:
    """Follows a step of a TPU; partition i of its program is the i-th device of `mesh`.

    A collective that libtpu fuses into products advances only during these products. Links send for one
    collective at a time. Copies between HBM and the chip's own memory advance while HBM is otherwise idle.
    """
    walk = _Walk(program, target, mesh, devices)
    took = walk.through(program.entry, 1)
    return Overlap(took.seconds, walk.hidden_seconds, dict(walk.hidden_bytes))


class _Walk:
    def __init__(self, program: Program, target: Target, mesh: Mesh, devices: Sequence[jax.Device]):
        self.program, self.target, self.mesh, self.devices = program, target, mesh, devices
        self.hidden_seconds = 0.0
        self.hidden_bytes: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()

    def through(self, computation: str, times: int) -> _Took:
        """Returns the time of one execution of a computation; its overlap is added `times` times."""
        seconds = memory = links = 0.0
        sending, copying = _Queue(), _Queue()
        begun: list[tuple[_Transfer, collectives.Collective, float]] = []
        for instruction in self.program.computations[computation].values():
            for name in self._ended(instruction):
                for queue, other in ((sending, copying), (copying, sending)):
                    if name in queue.transfers:
                        waited = queue.wait(name)
                        other.spend(waited)
                        seconds += waited
            own = self._own(instruction, computation, times)
            memory, links = memory + own.memory, links + own.links
            if instruction.op in _COPIES:
                copying.transfers[instruction.name] = _Transfer(instruction.name, own.memory)
                continue
            sending.spend(own.seconds - own.links, self._chains(instruction))
            copying.spend(own.seconds - own.memory)
            seconds += own.seconds
            for inner, one in self._begun(instruction):
                needed = one.traffic / roofline.bandwidth(one.members, self.target, self.devices)
                links += needed
                chains = self._chains(inner)
                name = chains[0] if chains else instruction.name
                transfer = sending.transfers[name] = _Transfer(name, needed, carried=bool(chains))
                begun.append((transfer, one, needed))
                if not chains and not instruction.op.endswith("-start"):
                    waited = sending.wait(name)
                    copying.spend(waited)
                    seconds += waited
        seconds += max(sum(t.left for t in queue.transfers.values()) for queue in (sending, copying))
        for transfer, one, needed in begun:
            if needed:
                self.hidden_seconds += times * transfer.hidden
                self.hidden_bytes[one.kind, one.axes] += times * one.traffic * transfer.hidden / needed
        return _Took(seconds, memory, links)

    def _begun(self, instruction: Instruction) -> Iterator[tuple[Instruction, collectives.Collective]]:
        """Yields the collectives that an instruction starts, itself or in a computation that it starts."""
        yield from collectives.begun(self.program, instruction, self.mesh)
        if instruction.op in ASIDE:
            for name in instruction.calls("to_apply", "calls"):
                for inner in self.program.computations[name].values():
                    yield from collectives.begun(self.program, inner, self.mesh)

    def _own(self, instruction: Instruction, computation: str, times: int) -> _Took:
        """Returns the time of an instruction with the computations that it runs."""
        parts = [t or 0.0 for t in work.of_instruction(self.program, instruction).seconds(self.target.chip)]
        seconds, memory, links = max(parts), parts[-1], 0.0
        if instruction.op in ASIDE:
            return _Took(seconds, memory, links)
        for name, turns in self.program.called(instruction, computation):
            inner = self.through(name, times * turns)
            seconds += turns * inner.seconds
            memory += turns * inner.memory
            links += turns * inner.links
        return _Took(seconds, memory, links)

    def _chains(self, instruction: Instruction) -> list[str]:
        """Returns the ids of the chains (collectives in several parts) that an instruction has a part of."""
        inside = self.program.inside(instruction) if instruction.op == "fusion" else [instruction]
        found = (re.search(r'chain_id="?(\w+)', inner.attributes) for inner in inside)
        return list(dict.fromkeys(match[0] for match in found if match))

    def _ended(self, instruction: Instruction) -> list[str]:
        """Returns the names of the transfers that an instruction waits for."""
        if instruction.op == "fusion":
            inside = self.program.inside(instruction)
            ends = any(inner.op == "custom-call" and _DONE in inner.attributes for inner in inside)
            return self._chains(instruction) if ends else []
        if not instruction.op.endswith("-done"):
            return []
        begun = self.program.instructions[instruction.operands[0]]
        while begun.op.endswith("-update"):
            begun = self.program.instructions[begun.operands[0]]
        return [begun.name]
