"""The memory that a compiled step needs, and the fastest settings with which it fits on a device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxir.core.errors import UserError
from jaxir.costs import hlo, overlap, targets
from jaxir.models.layers import POLICIES, Remat
from jaxir.runtime.partitioning import Partitioner

HEADROOM = 0.92  # share of a device's memory to use: allocators need some room between arrays


def memory_of(compiled: Any) -> int:
    """Returns the peak memory of a compiled program, in bytes per device."""
    used = compiled.memory_analysis()
    return (
        used.argument_size_in_bytes
        + used.output_size_in_bytes
        - used.alias_size_in_bytes
        + used.temp_size_in_bytes
        + used.generated_code_size_in_bytes
    )


def device_memory() -> int:
    """Returns the memory that a program may use, in bytes per device: the minimum over all processes."""
    devices = jax.local_devices()
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        limit = int(stats["bytes_limit"])
    else:  # a CPU's free memory is shared by all its devices
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        limit = int(available[1]) * 1024 // len(devices)
    # Processes exchange the limit in MiB, so that it fits into 32 bits.
    everywhere = multihost_utils.process_allgather(np.int32(limit >> 20))
    return int(np.min(everywhere)) << 20


def scheduled_seconds(compiled: Any, partitioner: Partitioner) -> float | None:
    """Returns the estimated seconds of a compiled step on TPUs at full speed, as the compiler scheduled it.

    None for other devices, whose programs call libraries (cuBLAS, oneDNN) without describing their work.
    """
    devices = list(partitioner.mesh.devices.flat)
    target = targets.of_devices(devices)
    if target is None or target.chip.kind != "tpu":
        return None
    return overlap.read(hlo.parse(compiled.as_text()), target, partitioner.mesh, devices).seconds


def fit_memory(
    remat: Remat,
    objective: Any,
    compile_step: Callable[[Remat, Any], Any],
    *,
    rows: int,
    limit: int,
    gathers: bool = False,
    kernels: bool = False,
    scanned: bool = False,
    size_of: Callable[[Any], int] = memory_of,
    seconds_of: Callable[[Any], float | None] = lambda compiled: None,
) -> tuple[Remat, Any, Any, str]:
    """Finds the fewest chunks with which a step fits into memory, and the fastest remat with these chunks.

    If times are unknown, the least recomputation is assumed to be fastest. For scanned blocks, keeping only
    matrix products (and gathered weights) is assumed to be fastest: copying everything else into the scan's
    arrays takes longer than recomputing it (docs/results/gpu.md).

    Args:
      remat: which activations of blocks are recomputed (rematerialisation), or "auto".
      objective: the objective; if it caches gradients, its field `chunks` is a number or "auto".
      compile_step: maps (remat, objective) to a compiled step.
      rows: number of examples of the batch per device; the number of chunks must divide it.
      limit: memory in bytes per device.
      gathers: whether devices gather weights from each other; gathered weights could be kept.
      kernels: whether the step may use the kernels of TPUs, whose inputs could be kept.
      scanned: whether the blocks are scanned (`scan_layers`).
      size_of: maps a compiled step to the memory that it needs, in bytes per device.
      seconds_of: maps a compiled step to its seconds, or to None if they are unknown.

    Returns:
      The remat, the objective with a number of chunks, the compiled step, and a sentence on this choice.
    """
    in_chunks, by_policy = getattr(objective, "chunks", 1) == "auto", remat == "auto"
    allowed = int(limit * HEADROOM)
    needed: dict[Remat, int] = {}
    by_time = (*POLICIES, False) if scanned else (False, *POLICIES)
    idle = [name for name, of in (("weights", gathers), ("kernels", kernels)) if not of]
    policies = [p for p in by_time if p not in idle] if by_policy else [remat]
    for chunks in [n for n in range(1, rows + 1) if rows % n == 0] if in_chunks else [1]:
        chosen = dataclasses.replace(objective, chunks=chunks) if in_chunks else objective
        fitting: list[tuple[float, Remat, Any, int]] = []
        for policy in policies:
            # n times as many chunks need at least 1/n of the memory: do not compile steps that cannot fit.
            if needed.get(policy, 0) > allowed * chunks:
                continue
            # If recomputing everything does not fit, keeping everything does not fit either.
            if by_policy and scanned and policy is False and all(found[1] is not True for found in fitting):
                continue
            try:
                compiled = compile_step(policy, chosen)
            except jax.errors.JaxRuntimeError as error:  # the TPU compiler raises it if memory is exceeded
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                continue
            size = size_of(compiled)
            if size > allowed:
                needed.setdefault(policy, size)
                continue
            seconds = seconds_of(compiled) if by_policy else None
            fitting.append((seconds or 0.0, policy, compiled, size))
            if seconds is None:
                break
        if fitting:
            _, policy, compiled, size = min(fitting, key=lambda found: found[0])
            chosen_values = [f"{chunks} chunks"] * in_chunks + [f"remat={policy}"] * by_policy
            note = f"{', '.join(chosen_values)}: {_gib(size)} of {_gib(limit)} GiB per device"
            return policy, chosen, compiled, note
    least = " and ".join(["one example per chunk"] * in_chunks + ["remat=True"] * by_policy)
    more = "" if in_chunks and by_policy else ", or set chunks" if by_policy else ", or set remat"
    raise UserError(
        f"the step does not fit into {_gib(limit)} GiB per device even with {least}: split the parameters"
        f" over more devices (fsdp){more}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
