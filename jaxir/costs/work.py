"""Counts operations and bytes, with each loop counted as often as it iterates.

`traced` counts the products of a step as written, over all chips. `compiled` counts what one chip runs
after partitioning, so duplicated work (such as an unsharded product) shows as the difference.
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

# Instructions that cause no memory traffic themselves.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "partition-id", "replica-id", "copy-done", "slice-done", "async-done", "async-update",
    "call-start", "call-done",
    "all-gather-done", "all-reduce-done", "collective-permute-done", "opt-barrier", "domain", "iota",
}  # fmt: skip
# Elementwise operations on the vector units; all other elementwise operations are negligible.
_VECTOR = {
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "negate", "abs",
    "exponential", "log", "log-plus-one", "exponential-minus-one", "logistic", "tanh", "rsqrt", "sqrt",
    "select", "compare", "and", "or", "xor", "not", "shift-left", "shift-right-logical",
    "shift-right-arithmetic", "convert", "clamp", "floor", "sign", "remainder", "erf", "cosine", "sine",
    "rng-bit-generator",
}  # fmt: skip
# bfloat16 passes of a float32 product of "high" precision on a TPU (XLA's bf16_3x algorithm).
_HIGH_PASSES = 3
# Operations that read only as much of their operand as they return.
_SLICES = {"dynamic-slice", "slice", "gather", "slice-start"}


class Work(NamedTuple):
    """Work of a step."""

    flops: float  # operations of matrix products; a multiply-add counts as two
    precise_flops: float  # the part in float32 products of highest precision
    # Elementwise operations: one for each element, random number and input of a reduction. A transcendental
    # function counts as one operation.
    vector: float
    bytes: float  # bytes read from and written to HBM
    high_flops: float = 0.0  # the part of `flops` in float32 products of JAX's "high" precision; TPUs only
    single_flops: float = 0.0  # the part of `flops` in float32 products of default precision

    def plus(self, other: Work, times: int = 1) -> Work:
        """Returns the sum of this and `times` the other."""
        return Work(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    def seconds(self, chip: Chip) -> tuple[float, float | None, float | None]:
        """Returns a chip's seconds at full speed for products, elementwise operations and HBM traffic.

        A time is None, unknown, if the work is 0.
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
    """Returns the work of one chip in a compiled step."""
    total = NOTHING
    for step in program.steps():
        total = total.plus(of_instruction(program, step.instruction), step.times)
    return total


def of_instruction(program: Program, instruction: Instruction) -> Work:
    """Returns one chip's work in an instruction and what is fused into it, without called computations."""
    types = program.instructions
    inside = program.inside(instruction) if instruction.op == "fusion" else [instruction]
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
    """Returns the products of `function` as written, over all chips; nothing else is counted."""
    return _trace(jax.make_jaxpr(function)(*shapes).jaxpr)


def largest(jaxpr: jax_core.Jaxpr) -> Any:
    """Returns the shape and type of the largest array of a program, over all chips."""
    found = [v.aval for equation in jaxpr.eqns for v in equation.outvars if hasattr(v.aval, "shape")]
    found += [v.aval for v in jaxpr.invars if hasattr(v.aval, "shape")]
    found += [largest(sub) for equation in jaxpr.eqns for sub in _subprograms(equation.params)]
    return max(found, key=size_of, default=jax.ShapeDtypeStruct((), jnp.float32))


def size_of(array: Any) -> int:
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
            total = total.plus(done, parameters["length"] if name == "scan" else _shards(equation))
    return total


def differentiated(function: Callable[..., Any], trained: Any, *others: Any) -> float:
    """Returns the operations of the products of `function(trained, *others)` and of its gradient.

    Recomputation is not counted. The gradient adds a product for each operand that depends on `trained`:
    none in a frozen layer, two in a trained layer.
    """
    jaxpr = jax.make_jaxpr(function)(trained, *others).jaxpr
    count = len(jax.tree.leaves(trained))
    return _differentiated(jaxpr, [i < count for i in range(len(jaxpr.invars))])[0]


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
        flops, outs = zip(*(_differentiated(body, ins[1:]) for body in bodies), strict=True)
        return max(flops), [any(branch) for branch in zip(*outs, strict=True)]
    if len(bodies) == 1 and len(bodies[0].invars) == len(ins):
        flops, outs = _differentiated(bodies[0], ins)
        return flops * _shards(equation), outs
    flops = sum(_differentiated(body, [any(ins)] * len(body.invars))[0] for body in bodies)
    return flops, [any(ins)] * len(equation.outvars)


def _carried(scan: jax_core.JaxprEqn, body: jax_core.Jaxpr) -> slice:
    """Returns which inputs of a scan are carried: after its constants, before the sliced inputs.

    Derived from shapes, because JAX 0.10 and 0.11 name these counts differently: a sliced input or stacked
    output has one more dimension outside the body.
    """

    def outside(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(a.aval.ndim == b.aval.ndim + 1 for a, b in zip(outer, inner, strict=True))

    end = len(body.invars) - outside(scan.invars, body.invars)
    return slice(end - (len(body.outvars) - outside(scan.outvars, body.outvars)), end)


def _shards(equation: jax_core.JaxprEqn) -> int:
    """Returns in how many parts a `shard_map` splits its arrays, each the work of one device; else 1."""
    if equation.primitive.name != "shard_map":
        return 1
    entries = [entry for spec in equation.params["in_specs"] for entry in spec if entry is not None]
    axes = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))}
    return math.prod(equation.params["mesh"].shape[axis] for axis in axes)


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
        return _declared(instruction, r'"cost_estimate":\{"flops":"(\d+)"')
    if instruction.op == "dot":
        left = types[instruction.operands[0]].arrays[0].shape
        contracted = _numbers(instruction.attribute("lhs_contracting_dims"))
        return 2.0 * instruction.arrays[0].size * math.prod(left[i] for i in contracted)
    if instruction.op == "convolution":
        return _convolution_flops(instruction, types)
    return 0.0


def _is_single(instruction: Instruction, types: dict[str, Instruction]) -> bool:
    """Returns whether this is a float32 product (on TPUs a convolution) of default precision."""
    if instruction.op != "dot" or "operand_precision" in instruction.attributes:
        return False
    return types[instruction.operands[0]].arrays[0].dtype == "f32"


def _declared(instruction: Instruction, pattern: str) -> float:
    """Returns a number that a kernel declares in its attributes; 0 if it declares none."""
    match = re.search(pattern, instruction.attributes)
    return float(match[1]) if match else 0.0


def _vector(instruction: Instruction, types: dict[str, Instruction]) -> float:
    if instruction.op == "custom-call":
        return _declared(instruction, r'"elementwise":"(\d+)"')
    if instruction.op in _VECTOR:
        return float(sum(a.size for a in instruction.arrays if a.shape))
    if instruction.op in ("reduce", "reduce-window"):
        source = types.get(instruction.operands[0])
        return float(source.arrays[0].size) if source and source.arrays else 0.0
    return 0.0


def _convolution_flops(instruction: Instruction, types: dict[str, Instruction]) -> float:
    """Counts the products of a convolution; TPU programs express every matrix product as a convolution.

    As in XLA's cost analysis, only positions where the window meets an input element are counted.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    left, right, out = (
        types[instruction.operands[0]].arrays[0].shape,
        types[instruction.operands[1]].arrays[0].shape,
        instruction.arrays[0].shape,
    )
    batch_groups = int(instruction.attribute("batch_group_count") or 1)
    features_in = right[labels[2].index("i")]  # input features of one group
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
    """Returns (stride, padding before, input dilation, kernel dilation) of each dimension."""

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
    if instruction.op == "custom-call" and not instruction.operands:  # an empty buffer
        return 0.0
    if instruction.op in ("copy-start", "slice-start"):  # between HBM and the chip's own memory
        return float(min((a.bytes for a in instruction.arrays if a.shape or a.bytes > 4), default=0))
    if instruction.op == "fusion":
        return _fusion_bytes(program, instruction)
    written = sum(a.bytes for a in instruction.arrays if not a.on_chip)
    if instruction.op == "dynamic-update-slice":
        return 2.0 * sum(a.bytes for a in types[instruction.operands[1]].arrays if not a.on_chip)
    if instruction.op in _SLICES:
        return 2.0 * written
    return float(written + sum(_read(types, name) for name in instruction.operands))


def _fusion_bytes(program: Program, fusion: Instruction) -> float:
    """Returns a fusion's traffic; of a sliced or updated array only the affected part is counted."""
    inner = program.fused(fusion)
    moved = 0.0
    for parameter in inner.values():
        if parameter.op == "parameter" and not any(a.on_chip for a in parameter.arrays):
            parts = _parts(program, inner, parameter.name)
            moved += sum(a.bytes for a in parameter.arrays) if parts is None else parts
    root = next(i for i in inner.values() if i.root)
    results = [inner[name] for name in root.operands] if root.op == "tuple" else [root]
    if len(results) != len(fusion.arrays):  # an operation with several results
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
    """Returns the bytes that a fusion reads of a parameter that it slices; None if it reads all."""
    uses = [instruction for instruction in inner.values() if name in instruction.operands]
    if [use.op for use in uses] == ["dynamic-update-slice"]:
        return 0.0
    moved = 0.0
    for use in uses:
        if use.op in _SLICES and use.operands[0] == name:
            moved += sum(a.bytes for a in use.arrays)
            continue
        if use.op != "fusion":  # reads all of the parameter, or uses it as an index
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
