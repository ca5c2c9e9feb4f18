"""Compiling: programs kept between processes, signals meanwhile, and what the compiler is told on GPUs."""

from __future__ import annotations

import contextlib
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

# A few hundred kilobytes each on a CPU, tens of megabytes for a large model on an accelerator.
MAX_BYTES = 4 << 30
# XLA joins products that share an operand where one of them is small, as queries' and passages' with the same
# weights, and copies both for it: T5 base's step takes .93 of its time without (docs/results/gpu.md).
GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 1}
# TPUs, as JAX names them, whose SparseCores can send for the rest of the chip, and what has them do it:
# gathers, reductions and scatters run beside what follows. The compiler's own way of hiding them, within
# products, is off: it takes one or the other. Recipes of MaxText and torchprime for v6e do so in part.
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
    """Points JAX's persistent compilation cache at the user's cache directory; call before jax is imported.

    There is a directory for each kind of processor, since a program compiled for one may not run on another
    that shares the home directory. Whoever sets JAX_COMPILATION_CACHE_DIR (empty: no cache) is left alone. A
    cache that cannot be read or written costs time, never the run.
    """
    directory = cache_directory() / f"programs-{_processor()}"
    # A command that another one has started finds it set to this.
    if os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(directory)) != str(directory):
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MAX_BYTES))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")
    _remove_half_written(directory)


def keep_no_more_programs() -> None:
    """Has this process neither keep nor reuse compiled programs from here on, whatever it compiled before."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the setting is looked at once, by the first program


def compiler_options(partitioner: Partitioner) -> Mapping[str, Any]:
    """Returns what the compiler is told of a step of training for a mesh."""
    devices = list(partitioner.mesh.devices.flat)
    if devices[0].platform == "gpu":
        return GPU_OPTIONS
    return SPARSE_CORE_OPTIONS if partitioner.sparse_cores and can_send(devices) else {}


def can_send(devices: Sequence[jax.Device]) -> bool:
    """Returns whether these are several chips, and have SparseCores that can send for them."""
    return len(devices) > 1 and devices[0].device_kind in SPARSE_CORES


def compile_step(lowered: jax.stages.Lowered, partitioner: Partitioner) -> jax.stages.Compiled:
    """Compiles a step of training with `compiler_options`, or without where a compiler does not know one."""
    import jax

    options = compiler_options(partitioner)
    if not options:
        return aside(lowered.compile)
    try:
        return aside(lambda: lowered.compile(compiler_options=dict(options)))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        print(f"warning: compiled without options that this compiler does not know: {error}", file=sys.stderr)
        return aside(lowered.compile)


def aside(function: Callable[[], T]) -> T:
    """Returns what a function does, called on a thread of its own, so that a signal reaches the process.

    XLA heeds none, for minutes. A command that is stopped leaves without it (`cli.end`).
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
    """Removes programs without the time of their last use, which a process that was killed has not written.

    With one of them there JAX keeps no program any more. One that is being written now is left.
    """
    with contextlib.suppress(OSError):
        names = {path.name for path in directory.iterdir()}
        for name in names:
            path, key = directory / name, name.removesuffix("-cache")
            if key != name and f"{key}-atime" not in names and path.stat().st_mtime < time.time() - 60:
                path.unlink()


def _processor() -> str:
    """Returns a name for this kind of processor and its instruction sets."""
    facts = {platform.machine(), platform.processor()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        facts |= {line for line in cpuinfo.read_text().splitlines() if line.startswith(wanted)}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:12]
