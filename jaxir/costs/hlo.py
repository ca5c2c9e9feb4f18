"""Parses compiled programs: from XLA's text to instructions, and how often each instruction runs.

XLA's own cost analysis counts the body of a loop, such as a scanned stack of layers, only once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Operations that start a computation, which ends at its "-done". A "call-start" runs on a TPU's SparseCores.
ASIDE = ("async-start", "call-start")

_BYTES = {"pred": 1, "bf16": 2, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
# A line break inside a kernel's metadata, which spans several lines.
_CONTINUED = re.compile(r"\n(?=\"|}+,)")
_COMMENT = re.compile(r"/\*.*?\*/")


class Array(NamedTuple):
    """The type of one array."""

    dtype: str  # XLA's name of the element type
    shape: tuple[int, ...]
    on_chip: bool  # whether the array is in the chip's own memory, not in HBM

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return self.size * _itemsize(self.dtype)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str  # unique in the program
    op: str  # XLA's operation, such as "all-gather"
    type: str  # type of the result, as text
    operands: tuple[str, ...]  # names of the operand instructions
    attributes: str  # the rest of the line, as text
    root: bool  # whether the instruction is the result of its computation

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result; several for a tuple."""
        return tuple(
            Array(dtype, tuple(int(n) for n in dims.split(",") if n), "S(1)" in layout)
            for dtype, dims, layout in _ARRAY.findall(self.type)
        )

    def attribute(self, name: str) -> str | None:
        """Returns the value of an attribute that is a name or is in braces, without the braces."""
        match = re.search(rf"\b{name}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})", self.attributes)
        return None if match is None else match[1] if match[1] is not None else match[2]

    def calls(self, *names: str) -> list[str]:
        """Returns the computations that the named attributes refer to."""
        found = [self.attribute(name) for name in names]
        return [part.strip().lstrip("%") for text in found if text for part in text.split(",")]


class Step(NamedTuple):
    """An instruction, the computation in which it runs, and how often."""

    instruction: Instruction
    computation: str  # name of the computation that contains it
    times: int  # number of executions in one run of the program


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program."""

    entry: str  # name of the computation that runs first
    # Computations by name; each maps names to instructions in order.
    computations: dict[str, dict[str, Instruction]]
    endless: list[str] = dataclasses.field(default_factory=list)  # loops with an unknown number of iterations
    turns: int = 1  # the number of iterations assumed for `endless` loops

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by name."""
        return {i.name: i for computation in self.computations.values() for i in computation.values()}

    def steps(self) -> Iterator[Step]:
        """Yields the instructions that run; loops and calls are expanded, fusions are not."""
        yield from self._walk(self.entry, 1)

    def fused(self, instruction: Instruction) -> dict[str, Instruction]:
        """Returns the instructions inside a fusion."""
        called = instruction.calls("calls")
        return self.computations[called[0]] if called else {}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields all instructions fused into an instruction, nested fusions too."""
        for name in instruction.calls("calls"):
            for inner in self.computations[name].values():
                yield inner
                if inner.op == "fusion":
                    yield from self.inside(inner)

    def called(self, instruction: Instruction, computation: str) -> list[tuple[str, int]]:
        """Returns the computations that an instruction runs (except a fusion's), and how often."""
        if instruction.op == "while":
            turns = self._turns(instruction, computation)
            return [(body, turns) for body in instruction.calls("body")]
        if instruction.op == "conditional":
            branches = ("branch_computations", "true_computation", "false_computation")
            return [(branch, 1) for branch in instruction.calls(*branches)]
        if instruction.op in ("call", *ASIDE):
            return [(name, 1) for name in instruction.calls("to_apply", "calls")]
        return []

    def _walk(self, computation: str, times: int) -> Iterator[Step]:
        for instruction in self.computations[computation].values():
            yield Step(instruction, computation, times)
            for name, turns in self.called(instruction, computation):
                yield from self._walk(name, times * turns)

    def _turns(self, loop: Instruction, computation: str) -> int:
        known = re.search(r"known_trip_count[^\d}]*n[^\d]*(\d+)", loop.attributes)
        if known:
            return int(known[1])
        turns = self._read_condition(loop, computation)
        if turns is not None:
            return turns
        if loop.name not in self.endless:
            self.endless.append(loop.name)
        return self.turns

    def _read_condition(self, loop: Instruction, computation: str) -> int | None:
        """Returns the iterations of `for i in range(first, last)`, the form that scans compile to."""
        condition = self.computations[loop.calls("condition")[0]]
        root = next(i for i in condition.values() if i.root)
        if root.op != "compare" or root.attribute("direction") not in ("LT", "LE"):
            return None
        first = self._initial(loop, computation, self._index(condition, root.operands[0]))
        last = self._constant(condition, root.operands[1])
        if last is None:
            last = self._initial(loop, computation, self._index(condition, root.operands[1]))
        if last is None or first is None:
            return None
        return last - first + (root.attribute("direction") == "LE")

    def _initial(self, loop: Instruction, computation: str, index: int | None) -> int | None:
        """Returns the initial value of element `index` of the loop's state."""
        around = self.computations[computation]
        state = around[loop.operands[0]]
        if index is None or state.op != "tuple":
            return None
        return self._constant(around, state.operands[index])

    def _constant(self, computation: dict[str, Instruction], name: str) -> int | None:
        found = _without_copies(computation, name)
        if found is None or found.op != "constant" or not re.fullmatch(r"-?\d+", found.operands[0]):
            return None
        return int(found.operands[0])

    def _index(self, computation: dict[str, Instruction], name: str) -> int | None:
        found = _without_copies(computation, name)
        is_element = found is not None and found.op == "get-tuple-element"
        return int(found.attribute("index")) if is_element else None


def _without_copies(computation: dict[str, Instruction], name: str) -> Instruction | None:
    """Returns the instruction of which the named one is a copy, or the instruction itself."""
    found = computation.get(name)
    while found is not None and found.op in ("copy", "bitcast", "copy-start", "copy-done"):
        found = computation.get(found.operands[0])
    return found


def parse(text: str) -> Program:
    """Reads the text of a compiled program (`compiled.as_text()`)."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in _CONTINUED.sub("", text).splitlines():
        if current is None or not line.startswith(" "):
            match = _COMPUTATION.match(line)
            if match and not line.startswith("HloModule"):
                current = computations.setdefault(match[2], {})
                entry = match[2] if match[1] else entry
            continue
        instruction = _parse_line(line)
        if instruction is not None:
            current[instruction.name] = instruction
    return Program(entry, computations)


def _parse_line(line: str) -> Instruction | None:
    match = _NAME.match(line)
    if match is None:
        return None
    rest = _COMMENT.sub("", line[match.end() :])
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    op, rest = rest[:opening], rest[opening:]
    end = _closing(rest)
    operands = tuple(o.strip().split(" ")[-1].lstrip("%") for o in _split(rest[1 : end - 1]))
    return Instruction(match[2], op, type_, operands, rest[end:], bool(match[1]))


def _closing(text: str) -> int:
    """Returns the position after the parenthesis that closes the first one of `text`."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses: {text:.80}")


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p for p in [*parts, text[start:]] if p.strip()]


def _itemsize(dtype: str) -> float:
    if dtype in _BYTES:
        return _BYTES[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) / 8 if digits else 0
