"""Compilation: the cache of programs, signals during compilation, and compiler options by platform."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxir.core.installation import cache_directory

if TYPE_CHECKING:
    import jax

    from jaxir.runtime.partitioning import Partitioner

# Maximum bytes of the cache. A program takes a few hundred kilobytes on a CPU, tens of megabytes for a large
# model on an accelerator.
MAX_BYTES = 4 << 30
# By default XLA merges small products that share an operand, such as queries and passages with shared
# weights, which copies both. Without merging T5 base's step takes .93 of the time (docs/results/gpu.md).
GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 1}
# `Device.device_kind` of TPUs whose SparseCores can run collectives, and the options for that. Gathers,
# reductions and scatters then overlap what follows. The compiler's fusion of collectives into products is
# off, because it and SparseCores exclude each other. MaxText and torchprime use some of these options on v6e.
SPARSE_CORES = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
SPARSE_CORE_OPTIONS = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
    "xla_enable_async_all_gather": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_enable_instruction_fusion": False,
    "xla_sc_disable_megacore_partitioning": True,
}
T = TypeVar("T")


def keep_compiled_programs() -> None:
    """Points JAX's persistent compilation cache at the user's cache directory; call before importing jax.

    Each kind of processor has its own directory, because a home directory may be shared with machines that
    cannot run the same programs. A JAX_COMPILATION_CACHE_DIR that the user has set (empty: no cache) is
    kept. Without a usable cache a command takes longer, but does not fail.
    """
    directory = _own_directory()
    # A child process inherits the variable with this value.
    if os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(directory)) != str(directory):
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MAX_BYTES))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")
    _remove_half_written(directory)


def program_directory() -> Path | None:
    """Returns the directory of `program_store`, beside JAX's cache; None if programs are not kept."""
    import jax

    place = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(_own_directory()))
    if not place or "://" in place or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(f"{place}-loadable")


def keep_no_more_programs() -> None:
    """Stops this process from storing or reusing compiled programs."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting only once


def compiler_options(partitioner: Partitioner) -> Mapping[str, Any]:
    """Returns the compiler options of a training step on a mesh."""
    devices = list(partitioner.mesh.devices.flat)
    if devices[0].platform == "gpu":
        return GPU_OPTIONS
    return SPARSE_CORE_OPTIONS if partitioner.sparse_cores and can_send(devices) else {}


def can_send(devices: Sequence[jax.Device]) -> bool:
    """Returns whether `devices` are several chips with SparseCores that can run collectives."""
    return len(devices) > 1 and devices[0].device_kind in SPARSE_CORES


def compile_step(lowered: jax.stages.Lowered, partitioner: Partitioner) -> jax.stages.Compiled:
    """Compiles a training step with `compiler_options`, or without them if the compiler lacks one."""
    import jax

    options = compiler_options(partitioner)
    if not options:
        return aside(lowered.compile)
    try:
        return aside(lambda: lowered.compile(compiler_options=dict(options)))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        print(f"warning: compiled without options, because this compiler lacks one: {error}", file=sys.stderr)
        return aside(lowered.compile)


def aside(function: Callable[[], T]) -> T:
    """Calls a function on another thread and returns its result; the main thread handles signals meanwhile.

    XLA ignores signals for minutes. A command that is stopped exits without waiting for XLA (`cli.end`).
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, name="compiler", daemon=True).start()
    found, error = results.get()
    if error is not None:
        raise error
    return found


def _remove_half_written(directory: Path) -> None:
    """Removes programs that a killed process did not finish, which lack a file with the access time.

    If such a program exists, JAX stores no further programs. Recent programs are kept: another process may
    be writing them.
    """
    with contextlib.suppress(OSError):
        names = {path.name for path in directory.iterdir()}
        for name in names:
            path, key = directory / name, name.removesuffix("-cache")
            if key != name and f"{key}-atime" not in names and path.stat().st_mtime < time.time() - 60:
                path.unlink()


def _own_directory() -> Path:
    return cache_directory() / f"programs-{processor()}"


@functools.cache
def processor() -> str:
    """Returns a hash of this processor's kind and instruction sets."""
    facts = {platform.machine(), platform.processor()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        facts |= {line for line in cpuinfo.read_text().splitlines() if line.startswith(wanted)}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:12]
