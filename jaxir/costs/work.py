"""How much a step computes and moves: operations and bytes, with loops counted as often as they turn.

Two readings. `traced` counts the products of the step as it was written, whatever the machine: exact, over
all chips. `compiled` counts what one chip runs after the compiler has split the step: what it does twice (a
product that is not sharded, say) shows as the difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core

from jaxir.costs.chips import Chip
from jaxir.costs.hlo import Instruction, Program

# Instructions that move nothing: names for what is there, or counted where they call.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "partition-id", "replica-id", "copy-done", "slice-done", "async-done", "async-update",
    "call-start", "call-done",
    "all-gather-done", "all-reduce-done", "collective-permute-done", "opt-barrier", "domain", "iota",
}  # fmt: skip
# Elementwise operations that the vector units carry out (XLA writes no others of weight).
_VECTOR = {
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "negate", "abs",
    "exponential", "log", "log-plus-one", "exponential-minus-one", "logistic", "tanh", "rsqrt", "sqrt",
    "select", "compare", "and", "or", "xor", "not", "shift-left", "shift-right-logical",
    "shift-right-arithmetic", "convert", "clamp", "floor", "sign", "remainder", "erf", "cosine", "sine",
    "rng-bit-generator",
}  # fmt: skip
# A TPU's bfloat16 products for one of float32 of high precision (XLA's bf16_3x algorithm).
_HIGH_PASSES = 3
# Reading these costs their result, not their operand.
_SLICES = {"dynamic-slice", "slice", "gather", "slice-start"}


class Work(NamedTuple):
    """What is done in a step.

    Attributes:
      flops: operations of matrix products, two for a multiplication with its addition; no elementwise ones.
      precise_flops: those among them that are float32 products of highest precision.
      vector: elementwise operations, random numbers and the inputs of reductions, one for each element; a
        transcendental function counts as one.
      bytes: read from and written to HBM.
      high_flops: those of `flops` that are float32 products of JAX's "high" precision; TPUs' only.
      single_flops: those of `flops` that are float32 products of the default precision.
    """

    flops: float
    precise_flops: float
    vector: float
    bytes: float
    high_flops: float = 0.0
    single_flops: float = 0.0

    def plus(self, other: Work, times: int = 1) -> Work:
        """Returns this and `times` the other."""
        return Work(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    def seconds(self, chip: Chip) -> tuple[float, float | None, float | None]:
        """Returns how long a chip takes at full speed for products, elementwise operations and HBM traffic.

        None stands for what is not known, of which there are 0.
        """
        flops = self.flops + (chip.precise_passes - 1) * self.precise_flops
        flops += (_HIGH_PASSES - 1) * self.high_flops + (chip.single_passes - 1) * self.single_flops
        return (
            flops / chip.flops,
            self.vector / chip.vector_rate if self.vector else None,
            self.bytes / chip.memory_bandwidth if self.bytes else None,
        )


NOTHING = Work(0.0, 0.0, 0.0, 0.0)


def compiled(program: Program) -> Work:
    """Returns what one chip does in a step of a compiled program."""
    total = NOTHING
    for step in program.steps():
        total = total.plus(of_instruction(program, step.instruction), step.times)
    return total


def of_instruction(program: Program, instruction: Instruction) -> Work:
    """Returns what one chip does in an instruction, a fusion with all in it; not in computations it runs."""
    types = program.instructions
    inside = [instruction]
    if instruction.op == "fusion":
        inside = [inner for _, inner in program.inside(instruction)]
    total = NOTHING
    for inner in inside:
        count = _flops(inner, types)
        is_high = bool(re.search(r"operand_precision=\{[^}]*\bhigh\b", inner.attributes))
        total = total.plus(
            Work(
                flops=count,
                precise_flops=count * ("highest" in inner.attributes),
                vector=_vector(inner, types),
                bytes=0.0,
                high_flops=count * is_high,
                single_flops=count * _is_single(inner, types),
            )
        )
    return total._replace(bytes=_bytes(program, instruction, types))


def traced(function: Callable[..., Any], *shapes: Any) -> Work:
    """Returns the products of `function` as it is written, over all chips; nothing else is counted."""
    return _trace(jax.make_jaxpr(function)(*shapes).jaxpr)


def largest(jaxpr: jax_core.Jaxpr) -> Any:
    """Returns the shape and type of the largest array that a program makes, over all chips."""
    found = [v.aval for equation in jaxpr.eqns for v in equation.outvars if hasattr(v.aval, "shape")]
    found += [v.aval for v in jaxpr.invars if hasattr(v.aval, "shape")]
    found += [largest(sub) for equation in jaxpr.eqns for sub in _subprograms(equation.params)]
    return max(found, key=size_of, default=jax.ShapeDtypeStruct((), jnp.float32))


def size_of(array: Any) -> int:
    """Returns the bytes of an array of which the shape and type are known."""
    return math.prod(array.shape) * array.dtype.itemsize


def _trace(jaxpr: jax_core.Jaxpr) -> Work:
    total = NOTHING
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            count, precision = _product(equation), str(parameters["precision"])
            by_default = "HIGH" not in precision and equation.invars[0].aval.dtype == jnp.float32
            precise = count * ("HIGHEST" in precision)
            total = total.plus(Work(count, precise, 0.0, 0.0, single_flops=count * by_default))
            continue
        inner = [_trace(sub) for sub in _subprograms(parameters)]
        for done in [max(inner)] if name == "cond" else inner:
            total = total.plus(done, parameters["length"] if name == "scan" else 1)
    return total


def differentiated(function: Callable[..., Any], trained: Any, *others: Any) -> float:
    """Returns the operations of the products of `function` and of its gradient, nothing computed twice.

    A product's gradient is a product more for each operand that depends on `trained`: none in a frozen
    module, two in a layer that is trained.

    Args:
      function: (trained, *others) -> anything.
      trained: shapes of what the gradient is taken of.
      *others: shapes of what it is not.
    """
    jaxpr = jax.make_jaxpr(function)(trained, *others).jaxpr
    of = len(jax.tree.leaves(trained))
    return _differentiated(jaxpr, [i < of for i in range(len(jaxpr.invars))])[0]


def _differentiated(jaxpr: jax_core.Jaxpr, live: Sequence[bool]) -> tuple[float, list[bool]]:
    """Returns the operations, and which outputs depend on the live inputs."""
    found = {v for v, is_live in zip(jaxpr.invars, live, strict=True) if is_live}
    flops = 0.0
    for equation in jaxpr.eqns:
        ins = [not isinstance(v, jax_core.Literal) and v in found for v in equation.invars]
        if equation.primitive.name == "dot_general":
            flops += _product(equation) * (1 + sum(ins))
            outs = [any(ins)]
        else:
            inside, outs = _inside(equation, ins)
            flops += inside
        for v, is_live in zip(equation.outvars, outs, strict=True):
            if is_live and jnp.issubdtype(v.aval.dtype, jnp.floating):
                found.add(v)
    return flops, [not isinstance(v, jax_core.Literal) and v in found for v in jaxpr.outvars]


def _inside(equation: jax_core.JaxprEqn, ins: list[bool]) -> tuple[float, list[bool]]:
    name, parameters = equation.primitive.name, equation.params
    bodies = list(_subprograms(parameters))
    if name == "scan":
        carried = _carried(equation, bodies[0])
        while True:
            flops, outs = _differentiated(bodies[0], ins)
            grown = [a or b for a, b in zip(ins[carried], outs, strict=False)]
            if grown == ins[carried]:
                return parameters["length"] * flops, outs
            ins = [*ins[: carried.start], *grown, *ins[carried.stop :]]
    if name == "cond":
        of = [_differentiated(body, ins[1:]) for body in bodies]
        return max(flops for flops, _ in of), [any(outs) for outs in zip(*(o for _, o in of), strict=True)]
    if len(bodies) == 1 and len(bodies[0].invars) == len(ins):
        return _differentiated(bodies[0], ins)
    flops = sum(_differentiated(body, [any(ins)] * len(body.invars))[0] for body in bodies)
    return flops, [any(ins)] * len(equation.outvars)


def _carried(scan: jax_core.JaxprEqn, body: jax_core.Jaxpr) -> slice:
    """Returns which inputs of a scan are carried: after its constants, before what it takes slices of.

    Read off the shapes, for JAX 0.11 names these numbers otherwise than JAX 0.10: what is sliced or stacked
    has a dimension more outside.
    """

    def outside(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(a.aval.ndim == b.aval.ndim + 1 for a, b in zip(outer, inner, strict=True))

    end = len(body.invars) - outside(scan.invars, body.invars)
    return slice(end - (len(body.outvars) - outside(scan.outvars, body.outvars)), end)


def _product(equation: jax_core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    return 2.0 * equation.outvars[0].aval.size * math.prod(left.shape[i] for i in contracted)


def _subprograms(parameters: dict[str, Any]) -> Iterator[jax_core.Jaxpr]:
    for value in parameters.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def _flops(instruction: Instruction, types: dict[str, Instruction]) -> float:
    if instruction.op == "custom-call":
        return _said(instruction, r'"cost_estimate":\{"flops":"(\d+)"')
    if instruction.op == "dot":
        left = types[instruction.operands[0]].arrays[0].shape
        contracted = _numbers(instruction.attribute("lhs_contracting_dims"))
        return 2.0 * instruction.arrays[0].size * math.prod(left[i] for i in contracted)
    if instruction.op == "convolution":
        return _convolution_flops(instruction, types)
    return 0.0


def _is_single(instruction: Instruction, types: dict[str, Instruction]) -> bool:
    """Whether it is a float32 product of the default precision; TPUs' programs have convolutions."""
    if instruction.op != "dot" or "operand_precision" in instruction.attributes:
        return False
    return types[instruction.operands[0]].arrays[0].dtype == "f32"


def _said(instruction: Instruction, pattern: str) -> float:
    """Returns what a kernel says of its work, for what is inside cannot be read; 0 where it says nothing."""
    match = re.search(pattern, instruction.attributes)
    return float(match[1]) if match else 0.0


def _vector(instruction: Instruction, types: dict[str, Instruction]) -> float:
    if instruction.op == "custom-call":
        return _said(instruction, r'"elementwise":"(\d+)"')
    if instruction.op in _VECTOR:
        return float(sum(a.size for a in instruction.arrays if a.shape))
    if instruction.op in ("reduce", "reduce-window"):
        source = types.get(instruction.operands[0])
        return float(source.arrays[0].size) if source and source.arrays else 0.0
    return 0.0


def _convolution_flops(instruction: Instruction, types: dict[str, Instruction]) -> float:
    """Counts the products of a convolution, which a TPU makes of every matrix product.

    As XLA's cost analysis does: only positions where the window meets an element of the input, neither
    padding nor the gaps of a dilation, count.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    left, right, out = (
        types[instruction.operands[0]].arrays[0].shape,
        types[instruction.operands[1]].arrays[0].shape,
        instruction.arrays[0].shape,
    )
    batch_groups = int(instruction.attribute("batch_group_count") or 1)
    features_in = right[labels[2].index("i")]  # of one group, where there are several
    features_out = out[labels[3].index("f")]
    batch = left[labels[1].index("b")] // batch_groups
    window = _window(instruction.attribute("window") or "", sum(c.isdigit() for c in labels[2]))
    positions = 1
    for dimension, (stride, before, gap_left, gap_right) in enumerate(window):
        digit = str(dimension)
        size = left[labels[1].index(digit)]
        kernel, result = right[labels[2].index(digit)], out[labels[3].index(digit)]
        where = np.arange(result)[:, None] * stride + np.arange(kernel)[None] * gap_right - before
        fits = (where >= 0) & (where % gap_left == 0) & (where // gap_left < size)
        positions *= int(fits.sum())
    return 2.0 * features_in * features_out * batch * positions


def _window(text: str, dimensions: int) -> list[tuple[int, int, int, int]]:
    """Returns (stride, padding before, dilation of the input, dilation of the kernel) of each dimension."""

    def values(name: str, default: str) -> list[str]:
        match = re.search(rf"\b{name}=([\w\-x]+)", text)
        return match[1].split("x") if match else [default] * dimensions

    stride, pad = values("stride", "1"), values("pad", "0_0")
    gap_left, gap_right = values("lhs_dilate", "1"), values("rhs_dilate", "1")
    return [
        (int(s), int(p.split("_")[0]), int(a), int(b))
        for s, p, a, b in zip(stride, pad, gap_left, gap_right, strict=True)
    ]


def _bytes(program: Program, instruction: Instruction, types: dict[str, Instruction]) -> float:
    """Returns the bytes that an instruction reads from and writes to HBM."""
    if instruction.op in _FREE:
        return 0.0
    if instruction.op == "custom-call" and not instruction.operands:  # a place for what is written later
        return 0.0
    if instruction.op in ("copy-start", "slice-start"):  # between HBM and the chip's own memory
        moved = (
            min(a.bytes for a in instruction.arrays if a.shape or a.bytes > 4) if instruction.arrays else 0
        )
        return float(moved)
    if instruction.op == "fusion":
        return _fusion_bytes(program, instruction)
    written = sum(a.bytes for a in instruction.arrays if not a.on_chip)
    if instruction.op == "dynamic-update-slice":
        return 2.0 * sum(a.bytes for a in types[instruction.operands[1]].arrays if not a.on_chip)
    if instruction.op in _SLICES:
        return 2.0 * written
    return float(written + sum(_read(types, name) for name in instruction.operands))


def _fusion_bytes(program: Program, fusion: Instruction) -> float:
    """Returns what a fusion reads and writes: of what it slices or updates in place only those parts."""
    inner = program.fused(fusion)
    moved = 0.0
    for parameter in inner.values():
        if parameter.op == "parameter" and not any(a.on_chip for a in parameter.arrays):
            parts = _parts(program, inner, parameter.name)
            moved += sum(a.bytes for a in parameter.arrays) if parts is None else parts
    root = next(i for i in inner.values() if i.root)
    results = [inner[name] for name in root.operands] if root.op == "tuple" else [root]
    if len(results) != len(fusion.arrays):  # an operation that gives several arrays itself
        return moved + sum(a.bytes for a in fusion.arrays if not a.on_chip)
    for result, array in zip(results, fusion.arrays, strict=True):
        while result.op == "bitcast" and result.operands[0] in inner:
            result = inner[result.operands[0]]
        if array.on_chip or result.op == "parameter":
            continue
        if result.op == "dynamic-update-slice":
            array = inner[result.operands[1]].arrays[0]
        moved += array.bytes
    return moved


def _parts(program: Program, inner: dict[str, Instruction], name: str) -> float | None:
    """Returns the bytes a fusion reads of a parameter of which it takes parts; None where it takes all."""
    uses = [instruction for instruction in inner.values() if name in instruction.operands]
    if [use.op for use in uses] == ["dynamic-update-slice"]:
        return 0.0
    moved = 0.0
    for use in uses:
        if use.op in _SLICES and use.operands[0] == name:
            moved += sum(a.bytes for a in use.arrays)
            continue
        if use.op != "fusion":  # an index of a slice too
            return None
        within = program.fused(use)
        for parameter in within.values():
            if parameter.op == "parameter" and use.operands[int(parameter.operands[0])] == name:
                parts = _parts(program, within, parameter.name)
                if parts is None:
                    return None
                moved += parts
    return moved if uses else None


def _read(types: dict[str, Instruction], name: str) -> float:
    instruction = types.get(name)
    if instruction is None or instruction.op == "constant":
        return 0.0
    return float(sum(a.bytes for a in instruction.arrays if not a.on_chip))


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n.strip()]
