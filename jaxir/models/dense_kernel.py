"""Pallas kernels of dense layers with adapters (LoRA), norms and residuals, for TPUs.

One kernel computes a gated feed-forward layer, y = x + W_o (f(W_0 n) * W_1 n) of n = RMSNorm(x). Its units
[B, L, F] stay on the chip, and its backward pass recomputes them from x. Another kernel computes several
layers W_i of the same n. All weights are in the chip's memory at once. So only x, the results and their
gradients move between HBM and the chip. The small products of an adapter cause no further transfers.
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
# Elementwise operations for each unit of a gated layer, as `jaxir.costs` counts them: forward and backward.
UNIT = {"silu": (4, 12), "gelu_tanh": (11, 24)}
# Bytes of the chip's memory that the kernels may use, of 128 MiB in a v5e or a v6e.
MEMORY = 100 << 20


@dataclasses.dataclass(frozen=True)
class Kind:
    """The static settings of a call; `interpret` runs a kernel on any machine, slowly, for tests.

    `activation` is that of a gated feed-forward layer, whose layers are W_0, W_1 and W_o. If it is None, each
    layer has its own result. `epsilon` is the norm's; None: there is no norm. `added` says whether an array
    is added to the first result: x in a feed-forward layer, else the second array of `rows`. `passed` says
    whether a further gradient is added to the gradient of x. `factors` are the factors of the layers'
    adapters, None for a layer without. `trained` says whether the backward kernel returns gradients of the
    kernels W.
    """

    activation: str | None
    epsilon: float | None
    added: bool
    factors: tuple[float | None, ...]
    passed: bool = False
    trained: bool = True
    interpret: bool = False


class Dense(NamedTuple):
    """A dense layer's kernel W [I, O], and A [I, r] and B [r, O] of its adapter; both None without one."""

    kernel: Any
    down: Any = None
    up: Any = None


def forward(
    rows: Sequence[jax.Array], scale: jax.Array | None, dense: Sequence[Dense], kind: Kind
) -> list[jax.Array]:
    """Returns the layers' results [N, O] on one device; `rows` are x [N, I] and perhaps [N, O] to add.

    `scale`, float32 [1, I], is the norm's, if there is a norm. Weights have the type of x.
    """
    like, x = [*dense] if kind.activation is None else [dense[2]], rows[0]
    results = [jax.ShapeDtypeStruct((len(x), layer.kernel.shape[1]), x.dtype) for layer in like]
    body = _project if kind.activation is None else _feed
    return _call(body, "dense_forward", kind, rows, scale, dense, results, [])


def backward(
    x: jax.Array,
    scale: jax.Array | None,
    dense: Sequence[Dense],
    gradients: Sequence[jax.Array],
    kind: Kind,
) -> tuple[jax.Array, jax.Array | None, list[Dense]]:
    """Returns the gradients of x [N, I], and those of `scale` and `dense`, summed over rows in float32.

    `gradients` are the gradients of the results, then the further one if `passed`. The gradients of kernels
    are None if the kernels are not `trained`.
    """
    like = _returned(dense, kind)
    sums = [] if scale is None else [scale]
    body = _project_back if kind.activation is None else _feed_back
    found = _call(body, "dense_backward", kind, [x, *gradients], scale, dense, [x], [*sums, *_flat(like)])
    return found[0], None if scale is None else found[1], _nested(found[1 + len(sums) :], like)


def fits(rows: int, shapes: Sequence[tuple[int, int]], rank: int) -> bool:
    """Returns whether the blocks of layers W [I, O], with all gradients, fit into the chip's memory."""
    lanes = -(-rank // 128) * 128
    weights = sum(inputs * outputs + (inputs + outputs) * lanes for inputs, outputs in shapes)
    blocks = ROWS * sum(map(sum, shapes)) * 10
    return rows % ROWS == 0 and weights * 6 + blocks <= MEMORY


def _returned(dense: Sequence[Dense], kind: Kind) -> list[Dense]:
    return list(dense) if kind.trained else [d._replace(kernel=None) for d in dense]


def _flat(dense: Sequence[Dense]) -> list[Any]:
    return [x for layer in dense for x in layer if x is not None]


def _nested(arrays: Sequence[Any], like: Sequence[Dense]) -> list[Dense]:
    left = iter(arrays)
    return [Dense(*(None if x is None else next(left) for x in layer)) for layer in like]


def _call(body, name, kind, rows, scale, dense, row_results, sums) -> list[jax.Array]:
    """Runs a kernel on blocks of rows, with whole weights; `sums` are summed over the blocks."""
    weights = [*([] if scale is None else [scale]), *_flat(dense)]
    results = [*row_results, *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in sums)]
    flops, operations = _work(rows[0].shape, dense, kind, backward=name == "dense_backward")
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*rows, *weights, *results))

    def block(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((ROWS, x.shape[1]), lambda i: (i, 0))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))

    return pl.pallas_call(
        functools.partial(body, kind, len(rows), len(weights)),
        name=name,
        grid=(len(rows[0]) // ROWS,),
        in_specs=[*map(block, rows), *map(whole, weights)],
        out_specs=[*map(block, row_results), *map(whole, sums)],
        out_shape=results,
        interpret=kind.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=MEMORY + (10 << 20)
        ),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved),
        metadata={"elementwise": str(operations)},
    )(*rows, *weights)


def _work(shape: tuple[int, int], dense: Sequence[Dense], kind: Kind, *, backward: bool) -> tuple[int, int]:
    """Returns the operations of a kernel's products, and its elementwise operations."""
    count, width = shape
    gated = kind.activation is not None
    products, operations = 0, width * ((21 if backward else 7) if kind.epsilon is not None else 2)
    for i, layer in enumerate(dense):
        inputs, outputs = layer.kernel.shape
        recomputed = gated and i < 2
        products += inputs * outputs * ((1 + recomputed + kind.trained) if backward else 1)
        operations += outputs * (not gated and not backward)
        operations += inputs * outputs // ROWS * (backward and kind.trained)  # sums of gradients
        if layer.down is not None:
            into, out = (n * layer.down.shape[1] for n in (inputs, outputs))
            products += ((3 + recomputed) * into + (2 + recomputed) * out) if backward else into + out
            operations += inputs + recomputed * outputs if backward else outputs
    if gated:
        operations += dense[0].kernel.shape[1] * UNIT[kind.activation][backward]
    return 2 * count * products, count * operations


def _dense(refs: Sequence[Any], kind: Kind) -> list[Dense]:
    like = [Dense(1, *((None, None) if factor is None else (1, 1))) for factor in kind.factors]
    return _nested(refs, like)


def _feed(kind: Kind, rows: int, weights: int, *refs) -> None:
    program, (x,), (result,) = _read(kind, rows, weights, refs)
    y = program.apply(2, program.units(program.normed(x[...]))[0])
    result[...] = (y + x[...].astype(jnp.float32) if kind.added else y).astype(x.dtype)


def _feed_back(kind: Kind, rows: int, weights: int, *refs) -> None:
    program, (x, gradient), (of_x, *sums) = _read(kind, rows, weights, refs)
    program.sum_into(sums)
    normed, g = program.normed(x[...]), gradient[...]
    units, pulled_back = program.units(normed)
    of_units = pulled_back(program.pull_back(2, units, g).astype(jnp.float32))
    d_normed = sum(program.pull_back(i, normed, d.astype(g.dtype)) for i, d in enumerate(of_units))
    d_x = program.norm_back(x[...], d_normed)
    of_x[...] = (d_x + g.astype(jnp.float32) if kind.added else d_x).astype(of_x.dtype)


def _project(kind: Kind, rows: int, weights: int, *refs) -> None:
    program, (x, *added), results = _read(kind, rows, weights, refs)
    normed = program.normed(x[...])
    for i, result in enumerate(results):
        y = program.apply(i, normed)
        result[...] = (y + added[0][...].astype(jnp.float32) if added and i == 0 else y).astype(result.dtype)


def _project_back(kind: Kind, rows: int, weights: int, *refs) -> None:
    program, (x, *gradients), (of_x, *sums) = _read(kind, rows, weights, refs)
    program.sum_into(sums)
    passed = gradients.pop() if kind.passed else None
    normed = program.normed(x[...])
    d_x = program.norm_back(
        x[...], sum(program.pull_back(i, normed, g[...]) for i, g in enumerate(gradients))
    )
    of_x[...] = (d_x if passed is None else d_x + passed[...].astype(jnp.float32)).astype(of_x.dtype)


def _read(kind: Kind, rows: int, weights: int, refs) -> tuple["_Program", Sequence[Any], Sequence[Any]]:
    return _Program(kind, refs[rows : rows + weights]), refs[:rows], refs[rows + weights :]


class _Program:
    """The layers of one program, for the forward and the backward kernel."""

    def __init__(self, kind: Kind, weights):
        first = kind.epsilon is not None
        self.kind, self.scale = kind, weights[0] if first else None
        self.dense, self.sums, self.of_scale = _dense(weights[first:], kind), None, None

    def sum_into(self, sums: Sequence[Any]) -> None:
        """Sets the arrays that sum the gradients of weights; the first block of rows zeroes them."""

        @pl.when(pl.program_id(0) == 0)
        def _():
            for ref in sums:
                ref[...] = jnp.zeros_like(ref)

        first = self.scale is not None
        self.of_scale = sums[0] if first else None
        self.sums = _nested(sums[first:], _returned(self.dense, self.kind))

    def normed(self, x: jax.Array) -> jax.Array:
        if self.scale is None:
            return x
        y = x.astype(jnp.float32)
        return (y * self._per_rms(y) * self.scale[...]).astype(x.dtype)

    def norm_back(self, x: jax.Array, gradient: jax.Array) -> jax.Array:
        """Returns the gradient of x from that of the normalised x, and adds to the gradient of the scale."""
        if self.scale is None:
            return gradient
        y = x.astype(jnp.float32)
        per_rms = self._per_rms(y)
        y *= per_rms
        self.of_scale[...] += (gradient * y).sum(axis=0, keepdims=True)
        gradient *= self.scale[...]
        return per_rms * (gradient - y * (gradient * y).mean(axis=-1, keepdims=True))

    def _per_rms(self, x: jax.Array) -> jax.Array:
        return jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + self.kind.epsilon)

    def units(self, normed: jax.Array) -> tuple[jax.Array, Any]:
        """Returns f(W_0 n) * W_1 n, and a function that maps its gradient to those of W_0 n and W_1 n."""
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
        """Returns the gradient of x [R, I] from that of the layer's result; adds to those of its weights."""
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
