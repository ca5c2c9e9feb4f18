"""Adaptations to CPUs: huge pages, fast bfloat16 products, and programs that run one at a time.

With AVX512-BF16, XLA multiplies bfloat16 twice as fast as float32 if the product is computed in float32 and
rounded later, and if the first factor is row-major. Otherwise bfloat16 is not faster. Accelerators are
fastest with plain products.

JAX is imported inside functions, because a restart must happen before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

# The type of an encoder's matrix products; "auto" takes the quicker type on this machine.
Dtype = Literal["auto", "float32", "bfloat16"]

_CPU_INFO = Path("/proc/cpuinfo")
TUNABLES = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb=1"
# The first version of glibc that reads the setting of huge pages.
SINCE = (2, 35)
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages(module: str) -> None:
    """Restarts `python -m MODULE` with a malloc that uses huge pages; call before heavy imports.

    With pages of 4 KiB the kernel needs a quarter of a run's time to provide buffers. glibc reads the
    setting only at process start. There is no restart without glibc, with --help, with GLIBC_TUNABLES set,
    under a debugger or launcher, or if the kernel ignores requests for huge pages.
    """
    if TUNABLES in os.environ or not _started_as(module) or not _would_help():
        return
    os.environ[TUNABLES] = SETTING
    with contextlib.suppress(OSError):  # without a restart the command is only slower
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
    except (AttributeError, ValueError, OSError):  # not Linux, or not glibc
        return False


def release_memory() -> None:
    """Returns freed memory, such as a compiler's, to the system; does nothing without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def when_done(found: Any) -> Any:
    """Waits for a program's result; call before running another program that does not depend on it.

    XLA's CPU devices share one thread pool, which may have no more threads than devices. If one device
    starts the next program and waits in its first collective, another may never get a thread to finish the
    previous one: a deadlock.
    """
    import jax

    return jax.block_until_ready(found)


@functools.cache
def has_quick_bfloat16() -> bool:
    """Returns whether this CPU multiplies bfloat16 natively (AVX512-BF16)."""
    return _has(" avx512_bf16")


def has_avx2() -> bool:
    """Returns whether this CPU has AVX2 and FMA."""
    return _has(" avx2 ") and _has(" fma ")


def _has(flag: str) -> bool:
    try:
        return flag in _CPU_INFO.read_text()
    except OSError:
        return False


def settled_dtype(dtype: Dtype) -> Literal["float32", "bfloat16"]:
    """Returns what "auto" means on this machine: bfloat16 on a CPU that multiplies it natively.

    Elsewhere, also on accelerators, "auto" is float32. docs/results/experiments.md compares rankings in
    both types.
    """
    import jax

    if dtype != "auto":
        return dtype
    return "bfloat16" if jax.default_backend() == "cpu" and has_quick_bfloat16() else "float32"


@functools.cache
def bfloat16_affine(devices: int) -> Callable[..., Any]:
    """Returns a function that maps x [N, I], W [I, O], and b [O] or None to x W + b [N, O] in bfloat16."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Layout, with_layout_constraint

    def row_by_row(x: jax.Array) -> jax.Array:
        # The barrier keeps XLA from fusing a transposition into a product.
        return with_layout_constraint(jax.lax.optimization_barrier(x), Layout((0, 1)))

    @jax.custom_vjp
    def affine(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = _product(x, kernel, 1, 0)
        return (y if bias is None else y + bias.astype(jnp.float32)[None, :]).astype(x.dtype)

    def forward(x, kernel, bias):
        return affine(x, kernel, bias), (x, kernel, bias is None)

    def backward(kept, slope):
        x, kernel, no_bias = kept
        if devices > 1:  # A forced layout would make XLA gather the whole batch on each device.
            of_kernel = _product(x, slope, 0, 0)
        elif x.shape[1] <= slope.shape[1]:  # Copying the narrower factor takes less time.
            of_kernel = _product(row_by_row(x.T), slope, 1, 0)
        else:
            of_kernel = row_by_row(_product(row_by_row(slope.T), x, 1, 0)).T
        # Summed in float32: a sum in bfloat16 would take a tenth of the step.
        of_bias = None if no_bias else slope.astype(jnp.float32).sum(0).astype(x.dtype)
        return _product(slope, kernel, 1, 1).astype(x.dtype), of_kernel.astype(kernel.dtype), of_bias

    affine.defvjp(forward, backward)
    return affine


def _product(left: Any, right: Any, left_axis: int, right_axis: int) -> Any:
    import jax

    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type="float32")
