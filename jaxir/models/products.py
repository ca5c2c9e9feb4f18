"""Matrix products of bfloat16 numbers, in the form that is quickest where they run.

XLA for CPUs with AVX512-BF16 multiplies bfloat16 numbers twice as quickly as float32 where the product is
float32 and rounded afterwards, and the first factor lies row by row; otherwise no quicker, or more slowly.
On accelerators the plain product is best.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

_CPU_INFO = Path("/proc/cpuinfo")


@functools.cache
def has_quick_bfloat16() -> bool:
    """Says whether this machine's CPU multiplies bfloat16 numbers by itself (AVX512-BF16)."""
    try:
        return " avx512_bf16" in _CPU_INFO.read_text()
    except OSError:
        return False


@contextlib.contextmanager
def as_run_on(mesh: Mesh) -> Iterator[None]:
    """Has `affine` take the form that is quickest on this machine's devices of `mesh`, while tracing.

    Not for programs that will run elsewhere: plans, exports.
    """
    quick = mesh.devices.flat[0].platform == "cpu" and has_quick_bfloat16()
    token = _QUICK_ON.set(mesh.size if quick else None)
    try:
        yield
    finally:
        _QUICK_ON.reset(token)


# The number of devices of which each multiplies quickly; None where they do not.
_QUICK_ON: contextvars.ContextVar[int | None] = contextvars.ContextVar("quick_on", default=None)


def affine(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns x W + b [N, O] in the type of x [N, I] and W [I, O]; b is [O] or None."""
    devices = _QUICK_ON.get()
    if devices is not None and x.dtype == jnp.bfloat16:
        return _rounded_afterwards(devices, x, kernel, bias)
    y = jnp.dot(x, kernel)
    return y if bias is None else y + bias[None, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_afterwards(devices: int, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    y = _product(x, kernel, 1, 0)
    return (y if bias is None else y + bias.astype(jnp.float32)[None, :]).astype(x.dtype)


def _forward(devices, x, kernel, bias):
    return _rounded_afterwards(devices, x, kernel, bias), (x, kernel, bias is None)


def _backward(devices, kept, slope):
    x, kernel, no_bias = kept
    if devices > 1:  # XLA would gather the whole batch for the layout.
        of_kernel = _product(x, slope, 0, 0)
    elif x.shape[1] <= slope.shape[1]:  # The narrower one is laid out anew, which takes less time.
        of_kernel = _product(_row_by_row(x.T), slope, 1, 0)
    else:
        of_kernel = _row_by_row(_product(_row_by_row(slope.T), x, 1, 0)).T
    # Summed in bfloat16, XLA would need a tenth of the step for it.
    of_bias = None if no_bias else slope.astype(jnp.float32).sum(0).astype(x.dtype)
    return _product(slope, kernel, 1, 1).astype(x.dtype), of_kernel.astype(kernel.dtype), of_bias


_rounded_afterwards.defvjp(_forward, _backward)


def _product(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _row_by_row(x: jax.Array) -> jax.Array:
    """Has x [M, N] lie so in memory; the barrier keeps XLA from making a transposition part of a product."""
    return with_layout_constraint(lax.optimization_barrier(x), Layout((0, 1)))
