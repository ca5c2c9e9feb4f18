"""What is particular to CPUs: huge pages, quick bfloat16 products, and programs that may not run at once.

XLA for CPUs with AVX512-BF16 multiplies bfloat16 numbers twice as quickly as float32 where the product is
float32 and rounded afterwards, and the first factor lies row by row; otherwise no quicker, or more slowly.
On accelerators the plain product is best.

JAX is imported where it is used: who starts a process anew does so before that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CPU_INFO = Path("/proc/cpuinfo")
TUNABLES = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb=1"
# glibc reads the setting since this version.
SINCE = (2, 35)
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages(module: str) -> None:
    """Starts `python -m MODULE` anew with a malloc that asks for huge pages; call before heavy imports.

    XLA gives the buffers of a step back and allocates them again for the next one; with pages of 4 KiB the
    system spends a quarter of the time on handing them out. glibc reads the setting when a process starts,
    and nowhere else; process number, streams and exit status are those of one process. Nothing happens where
    it would not help (no glibc, a system that gives huge pages always or never, a command that is asked for
    its help), where the user has set GLIBC_TUNABLES, or where a debugger or a launcher runs the module.
    """
    if TUNABLES in os.environ or not _started_as(module) or not _would_help():
        return
    os.environ[TUNABLES] = SETTING
    with contextlib.suppress(OSError):  # a system that forbids it costs time, never the run
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _started_as(module: str) -> bool:
    given = sys.orig_argv
    return "-m" in given and given[given.index("-m") + 1 :] == [module, *sys.argv[1:]]


def _would_help() -> bool:
    if not {"-h", "--help"}.isdisjoint(sys.argv):
        return False
    try:
        library, _, version = os.confstr("CS_GNU_LIBC_VERSION").partition(" ")
        numbers = tuple(int(n) for n in version.split(".")[:2])
        return library == "glibc" and numbers >= SINCE and "[madvise]" in _SYSTEM.read_text()
    except (AttributeError, ValueError, OSError):  # another system, or another library
        return False


def when_done(found: Any) -> Any:
    """Returns what a program makes once it has ended: call before another one that does not depend on it.

    XLA for CPUs runs all devices on one pool, which may have no more threads than there are devices. One that
    begins the next program takes a thread and waits in its first collective; another, left without a thread,
    never comes to the collective of the program before, and all wait for ever.
    """
    import jax

    return jax.block_until_ready(found)


@functools.cache
def has_quick_bfloat16() -> bool:
    """Says whether this machine's CPU multiplies bfloat16 numbers by itself (AVX512-BF16)."""
    try:
        return " avx512_bf16" in _CPU_INFO.read_text()
    except OSError:
        return False


@functools.cache
def bfloat16_affine(devices: int) -> Callable[..., Any]:
    """Returns (x [N, I], W [I, O], b [O] or None) -> x W + b [N, O], bfloat16, for so many CPU devices."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Layout, with_layout_constraint

    def row_by_row(x: jax.Array) -> jax.Array:
        # The barrier keeps XLA from making a transposition part of a product.
        return with_layout_constraint(jax.lax.optimization_barrier(x), Layout((0, 1)))

    @jax.custom_vjp
    def affine(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = _product(x, kernel, 1, 0)
        return (y if bias is None else y + bias.astype(jnp.float32)[None, :]).astype(x.dtype)

    def forward(x, kernel, bias):
        return affine(x, kernel, bias), (x, kernel, bias is None)

    def backward(kept, slope):
        x, kernel, no_bias = kept
        if devices > 1:  # XLA would gather the whole batch for the layout.
            of_kernel = _product(x, slope, 0, 0)
        elif x.shape[1] <= slope.shape[1]:  # The narrower one is laid out anew, which takes less time.
            of_kernel = _product(row_by_row(x.T), slope, 1, 0)
        else:
            of_kernel = row_by_row(_product(row_by_row(slope.T), x, 1, 0)).T
        # Summed in bfloat16, XLA would need a tenth of the step for it.
        of_bias = None if no_bias else slope.astype(jnp.float32).sum(0).astype(x.dtype)
        return _product(slope, kernel, 1, 1).astype(x.dtype), of_kernel.astype(kernel.dtype), of_bias

    affine.defvjp(forward, backward)
    return affine


def _product(left: Any, right: Any, left_axis: int, right_axis: int) -> Any:
    import jax

    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type="float32")
