"""Norms and RoPE of attention's heads, inside the kernels of `attention_kernel.py`.

Outside these kernels, norms and RoPE would read and write the heads in HBM several times, in other layouts
than those of matrix products. Inside the kernels they cause no transfers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

QUERY, KEY, VALUE = range(3)
# Elementwise operations, as `jaxir.costs` counts them, for each number of a head: in the forward pass, and in
# both passes together. A mean counts one operation.
NORM, ROPE = (6, 18), (5, 10)


@dataclasses.dataclass(frozen=True)
class Mapping:
    """The steps that map heads before attention: RMSNorm with `epsilon` of `normed` arrays, then RoPE.

    `normed` says for queries, keys and values whether they are normalised. If `rotated`, RoPE rotates queries
    and keys.
    """

    normed: tuple[bool, bool, bool] = (False, False, False)
    epsilon: float = 0.0
    rotated: bool = False

    @property
    def inputs(self) -> int:
        """Number of arrays that a kernel reads for the mapping: RoPE's table, then the norms' scales."""
        return self.rotated + any(self.normed)

    def operations(self, shared: int, backward: bool) -> float:
        """Returns the elementwise operations for each number of the queries."""
        parts = (1.0, 1.0 / shared, 1.0 / shared)
        normed = sum(part for part, is_normed in zip(parts, self.normed, strict=True) if is_normed)
        return NORM[backward] * normed + ROPE[backward] * self.rotated * sum(parts[:VALUE])


class HeadMap:
    """A `Mapping` in a kernel: `table` [2, L, K] has cosines and signed sines, `scales` [3, K] the scales."""

    def __init__(self, mapping: Mapping, arrays: Any):
        self.mapping = mapping
        self.table = arrays[0] if mapping.rotated else None
        self.scales = arrays[-1] if any(mapping.normed) else None

    def forward(self, x: jax.Array, part: int) -> jax.Array:
        """Maps one head x [L, K] of queries, keys or values."""
        normed, rotated = self._of(part)
        if not normed and not rotated:
            return x
        y = x.astype(jnp.float32)
        if normed:
            y = y * self._per_rms(y) * self.scales[part : part + 1]
        if rotated:
            y = y * self.table[0] + _halves_swapped(y) * self.table[1]
        return y.astype(x.dtype)

    def backward(self, x: jax.Array, part: int, gradient: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the float32 gradients of x [L, K] and of its scale [1, K], from that of the mapped x."""
        normed, rotated = self._of(part)
        if rotated:
            gradient = gradient * self.table[0] + _halves_swapped(gradient * self.table[1])
        if not normed:
            return gradient, None
        y = x.astype(jnp.float32)
        per_rms = self._per_rms(y)
        y *= per_rms
        of_scale = (gradient * y).sum(axis=0, keepdims=True)
        gradient *= self.scales[part : part + 1]
        return per_rms * (gradient - y * (gradient * y).mean(axis=-1, keepdims=True)), of_scale

    def _of(self, part: int) -> tuple[bool, bool]:
        return self.mapping.normed[part], self.mapping.rotated and part != VALUE

    def _per_rms(self, y: jax.Array) -> jax.Array:
        return jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + self.mapping.epsilon)


def rope_table(frequencies: jax.Array, length: int) -> jax.Array:
    """Returns t, float32 [2, L, K]: RoPE of x is x * t[0] + (x with swapped halves) * t[1]."""
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)])


def _halves_swapped(x: jax.Array) -> jax.Array:
    return pltpu.roll(x, x.shape[1] // 2, axis=1)
