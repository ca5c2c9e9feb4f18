"""Kernels and tables kept in 8 or 4 bits; their products are computed in the usual types (weight-only).

The library qwix computes the numbers. Beside a quantised parameter [..., M, N] there is a parameter of
float32 scales of the same rank. Each scale belongs to a block of the quantised parameter:

| scheme | parameter | numbers | scales |
|---|---|---|---|
| int8 | kernel [I, O] | int8 | [1, O], one for each output |
| nf4 | kernel [I, O] | uint8 [I / 2, O] | [I / T, O], one for T inputs of an output; T <= 64 |
| both | table [V, E] of tokens | int8 | [V, 1], one for each row |

nf4 is the 4-bit NormalFloat of QLoRA (Dettmers et al. 2023); the scales are not quantised again. A byte holds
the levels of two inputs, T / 2 apart. JAX 0.10.2 cannot run a compiled CPU program on arrays of uint4.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Scheme = Literal["int8", "nf4"]
BLOCK = 64  # largest number of inputs that share a scale of nf4, as in QLoRA


@dataclasses.dataclass(frozen=True)
class How:
    """How a parameter is quantised.

    Attributes:
      kind: the type of the numbers, "int8" or "nf4".
      axis: the axis along which blocks lie, -1 or -2.
      block: numbers per block.
    """

    kind: Scheme
    axis: int
    block: int

    @classmethod
    def of_kernel(cls, inputs: int, scheme: Scheme) -> How:
        """Returns how a kernel [..., I, O] with I inputs is quantised; in int8 if I is odd."""
        if scheme == "int8" or inputs % 2:
            return cls("int8", -2, inputs)
        return cls(scheme, -2, next(n for n in range(min(BLOCK, inputs), 0, -2) if inputs % n == 0))

    @property
    def dtype(self) -> Any:
        return jnp.int8 if self.kind == "int8" else jnp.uint8

    def kept(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the quantised numbers of a parameter of `shape`."""
        return tuple(shape) if self.kind == "int8" else (*shape[:-2], shape[-2] // 2, shape[-1])

    def blocks(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of a parameter of `shape`."""
        found = list(shape)
        found[self.axis] //= self.block
        return tuple(found)


@functools.partial(jax.jit, static_argnums=1)
def quantize(x: jax.Array, how: How) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of float32 x [..., M, N] and their scales, by qwix's absmax calibration."""
    import qwix

    axis = x.ndim + how.axis
    single = [other for other in range(x.ndim) if other != axis]
    tiled = {axis: how.block} if how.block < x.shape[axis] else {}
    qtype = jnp.int8 if how.kind == "int8" else how.kind
    found = qwix.quantize(x, qtype, channelwise_axes=single, tiled_axes=tiled)
    if how.kind == "int8":
        return found.qvalue, found.scale
    *stacked, inputs, outputs = x.shape
    levels = found.qvalue.astype(jnp.uint8).reshape(*stacked, -1, 2, how.block // 2, outputs)
    low, high = levels[..., 0, :, :], levels[..., 1, :, :]
    return (low | high << 4).reshape(*stacked, inputs // 2, outputs), found.scale


def dequantize(numbers: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Returns the parameter that quantised numbers and their scales stand for, in `dtype`."""
    import qwix

    scales = scales.astype(dtype)
    if numbers.dtype == jnp.int8:
        return qwix.dequantize(qwix.QArray(numbers, scales))
    *stacked, pairs, outputs = numbers.shape
    halves = numbers.reshape(*scales.shape[:-1], -1, outputs)
    levels = jnp.concatenate([halves & 15, halves >> 4], axis=-2).astype(jnp.uint4)
    return qwix.dequantize(qwix.QArray(levels.reshape(*stacked, 2 * pairs, outputs), scales, None, "nf4"))


def look_up(numbers: jax.Array, scales: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
    """Returns the rows with ids [...] of an int8 table [V, E], in `dtype`; NaN for ids outside the table."""
    rows = jnp.take(numbers, ids, axis=0).astype(jnp.float32)
    return (rows * jnp.take(scales, ids, axis=0)).astype(dtype)


def is_quantized(array: Any) -> bool:
    """Returns whether an array, or its shape and type, holds quantised numbers."""
    return not jnp.issubdtype(array.dtype, np.floating)
