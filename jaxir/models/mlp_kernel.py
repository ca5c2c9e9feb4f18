"""Pallas kernels of gated feed-forward layers for TPUs: units [B, L, F] stay on the chip.

One kernel computes y = x + W_o (f(W_0 n) * W_1 n) of n = RMSNorm(x), with the additions of adapters (LoRA).
All weights are in the chip's memory at once, and the backward kernel recomputes the units from x. So only x
and y, and their gradients, move between HBM and the chip.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxir.models.activations import ACTIVATIONS

# Rows of tokens that are read together: enough to fill a matrix unit.
ROWS = 256
# Bytes of the chip's memory that the kernels may use, of 128 MiB in a v5e or a v6e.
MEMORY = 100 << 20


@dataclasses.dataclass(frozen=True)
class Kind:
    """The static settings of a call; `interpret` runs a kernel on any machine, slowly, for tests.

    `epsilon` is that of the norm, `added` says whether x is added to the result. `factors` are those of the
    adapters of W_0, W_1 and W_o, None for a layer without. `trained` says whether the backward kernel
    returns gradients of the three kernels W.
    """

    activation: str
    epsilon: float
    added: bool
    factors: tuple[float | None, float | None, float | None] = (None, None, None)
    trained: bool = True
    interpret: bool = False


class Dense(NamedTuple):
    """A dense layer's kernel W [I, O] and its adapter's A [I, r] and B [r, O], or None."""

    kernel: Any
    down: Any = None
    up: Any = None


def forward(x: jax.Array, scale: jax.Array, dense: Sequence[Dense], kind: Kind) -> jax.Array:
    """Returns y [N, E] of x [N, E], on one device.

    `scale` float32 [1, E] is that of the norm. `dense` has W_0 and W_1 [E, F] and W_o [F, E], in x's type.
    """
    return _call(_forward, "mlp_forward", kind, [x], [scale, *_flat(dense)], [x], [])[0]


def backward(
    x: jax.Array, scale: jax.Array, dense: Sequence[Dense], gradient: jax.Array, kind: Kind
) -> tuple[jax.Array, jax.Array, list[Dense]]:
    """Returns the gradients of x [N, E], and in float32 of `scale` and of `dense`, summed over the rows.

    `gradient` [N, E] is that of y. The gradients of kernels are None if they are not `trained`.
    """
    weights = [scale, *_flat(dense)]
    sums = [scale, *_flat(_returned(dense, kind))]
    of_x, of_scale, *rest = _call(_backward, "mlp_backward", kind, [x, gradient], weights, [x], sums)
    return of_x, of_scale, _nested(rest, _returned(dense, kind))


def fits(x: tuple[int, int], units: int, rank: int) -> bool:
    """Returns whether the kernels' blocks, with all gradients, fit into the chip's memory."""
    lanes = -(-rank // 128) * 128
    size = 3 * x[1] * units + 3 * (x[1] + units) * lanes
    return x[0] % ROWS == 0 and size * 6 + ROWS * (units * 24 + x[1] * 24) <= MEMORY


def _returned(dense: Sequence[Dense], kind: Kind) -> list[Dense]:
    return list(dense) if kind.trained else [d._replace(kernel=None) for d in dense]


def _flat(dense: Sequence[Dense]) -> list[Any]:
    return [x for layer in dense for x in layer if x is not None]


def _nested(arrays: Sequence[Any], like: Sequence[Dense]) -> list[Dense]:
    left = iter(arrays)
    return [Dense(*(None if x is None else next(left) for x in layer)) for layer in like]


def _call(body, name, kind, rows, weights, row_results, sums) -> list[jax.Array]:
    """Runs a kernel on blocks of rows, with whole `weights`; `sums` are summed over the blocks."""
    count, width = rows[0].shape
    block = pl.BlockSpec((ROWS, width), lambda i: (i, 0))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in row_results]
    results += [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in sums]
    flops, operations = _work(count, weights, kind, backward=body is _backward)
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*rows, *weights, *results))
    return pl.pallas_call(
        functools.partial(body, kind, len(weights)),
        name=name,
        grid=(count // ROWS,),
        in_specs=[*(block for _ in rows), *map(whole, weights)],
        out_specs=[*(block for _ in row_results), *map(whole, sums)],
        out_shape=results,
        interpret=kind.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=MEMORY + (10 << 20)
        ),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved),
        metadata={"elementwise": str(operations)},
    )(*rows, *weights)


def _work(count: int, weights: Sequence[Any], kind: Kind, *, backward: bool) -> tuple[int, int]:
    """Returns the operations of a kernel's products, and its elementwise operations."""
    first, *_ = dense = _dense(weights[1:], kind)
    (width, units), last = first.kernel.shape, dense[2]
    products = 0
    for layer in dense:
        inputs, outputs = layer.kernel.shape
        recomputed = layer is not last
        products += inputs * outputs * ((1 + recomputed + kind.trained) if backward else 1)
        if layer.down is not None:
            rank = layer.down.shape[1]
            into, out = inputs * rank, outputs * rank
            products += (3 * into + (2 + recomputed) * out) if backward else into + out
    for_unit, for_number = (20, 24) if backward else (7, 9)
    return 2 * count * products, count * (units * for_unit + width * for_number)


def _dense(refs: Sequence[Any], kind: Kind) -> list[Dense]:
    like = [Dense(1, *((None, None) if factor is None else (1, 1))) for factor in kind.factors]
    return _nested(refs, like)


def _forward(kind: Kind, weights: int, *refs) -> None:
    x, scale, *dense = refs[: 1 + weights]
    program = _Program(kind, scale, dense)
    y = program.apply(2, program.units(program.normed(x[...]))[0])
    refs[-1][...] = (y + x[...].astype(jnp.float32) if kind.added else y).astype(x.dtype)


def _backward(kind: Kind, weights: int, *refs) -> None:
    x, gradient, scale, *dense = refs[: 2 + weights]
    of_x, of_scale, *sums = refs[2 + weights :]

    @pl.when(pl.program_id(0) == 0)
    def _():
        for ref in (of_scale, *sums):
            ref[...] = jnp.zeros_like(ref)

    program = _Program(kind, scale, dense, sums)
    normed, g = program.normed(x[...]), gradient[...]
    units, pulled_back = program.units(normed)
    of_units = pulled_back(program.pull_back(2, units, g).astype(jnp.float32))
    d_normed = sum(program.pull_back(i, normed, d.astype(g.dtype)) for i, d in enumerate(of_units))
    y = x[...].astype(jnp.float32)
    per_rms = program.per_rms(y)
    y *= per_rms
    of_scale[...] += (d_normed * y).sum(axis=0, keepdims=True)
    d_normed *= scale[...]
    d_x = per_rms * (d_normed - y * (d_normed * y).mean(axis=-1, keepdims=True))
    of_x[...] = (d_x + g.astype(jnp.float32) if kind.added else d_x).astype(of_x.dtype)


class _Program:
    """The layers of one program, for the forward and the backward kernel."""

    def __init__(self, kind: Kind, scale, dense, sums=None):
        self.kind, self.scale, self.dense = kind, scale, _dense(dense, kind)
        self.sums = None if sums is None else _nested(sums, _returned(self.dense, kind))

    def per_rms(self, x: jax.Array) -> jax.Array:
        return jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + self.kind.epsilon)

    def normed(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        return (y * self.per_rms(y) * self.scale[...]).astype(x.dtype)

    def units(self, normed: jax.Array) -> tuple[jax.Array, Any]:
        """Returns f(W_0 n) * W_1 n, and a function from its gradient to those of W_0 n and W_1 n."""
        units, pull_back = jax.vjp(
            lambda gate, other: ACTIVATIONS[self.kind.activation](gate) * other,
            self.apply(0, normed),
            self.apply(1, normed),
        )
        return units.astype(normed.dtype), pull_back

    def inside(self, index: int, x: jax.Array) -> jax.Array:
        """Returns x A times the adapter's factor."""
        return (_dot(x, self.dense[index].down[...]) * self.kind.factors[index]).astype(x.dtype)

    def apply(self, index: int, x: jax.Array) -> jax.Array:
        layer = self.dense[index]
        y = _dot(x, layer.kernel[...])
        return y if layer.down is None else y + _dot(self.inside(index, x), layer.up[...])

    def pull_back(self, index: int, x: jax.Array, gradient: jax.Array) -> jax.Array:
        """Returns the gradient of x [R, I] from that of the layer's result, and sums those of its weights."""
        layer, sums = self.dense[index], self.sums[index]
        of_x = _dot(gradient, layer.kernel[...], (1, 1))
        if sums.kernel is not None:
            sums.kernel[...] += _dot(x, gradient, (0, 0))
        if layer.down is not None:
            inside = (_dot(gradient, layer.up[...], (1, 1)) * self.kind.factors[index]).astype(x.dtype)
            sums.down[...] += _dot(x, inside, (0, 0))
            sums.up[...] += _dot(self.inside(index, x), gradient, (0, 0))
            of_x += _dot(inside, layer.down[...], (1, 1))
        return of_x


def _dot(left: jax.Array, right: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns the product over the `contracted` dimensions, in float32."""
    dimensions = tuple((n,) for n in contracted)
    return jax.lax.dot_general(left, right, (dimensions, ((), ())), preferred_element_type=jnp.float32)
