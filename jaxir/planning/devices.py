"""Devices that plans compile for without having them: TPU slices, and CPU devices in place of GPUs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxir.core.errors import UserError
from jaxir.core.installation import cache_directory, clone, pip_install
from jaxir.core.progress import silenced
from jaxir.costs.targets import Target

# In a clone, `make plan-tools` installs libtpu here. In the environment, libtpu would make JAX look for TPUs.
TOOLS = root / ".plan-tools" if (root := clone()) else cache_directory() / "plan-tools"


def get(target: Target) -> Sequence[jax.Device]:
    """Returns devices to compile for. Must be called before JAX is used, since it selects the platform."""
    is_gpu, count = target.chip.kind == "gpu", target.count
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        if is_gpu:
            jax.config.update("jax_num_cpu_devices", count)
    if not is_gpu:
        return _tpu_devices(target)
    found = jax.devices("cpu")
    if len(found) < count:
        raise UserError(f"JAX already uses {len(found)} devices, not {count}: plan in a new process")
    return found[:count]


def _tpu_devices(target: Target) -> Sequence[jax.Device]:
    """Returns the chips of a TPU slice, for compiling only."""
    os.environ["TPU_LIBRARY_PATH"] = str(find_libtpu())
    # Without these settings libtpu looks for TPUs of this machine, logs that there are none, and only one
    # process can load it.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    quiet = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    for name, value in (quiet | {"TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}).items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    chip, shape = target.chip, target.shape
    options = {"chip_config_name": "megacore" if chip.name == "v4" else "default"}
    padded = (*shape, *(1 for _ in range(3 - len(shape))))
    options["wrap"] = (*chip.wraps(shape), *(False for _ in range(3 - len(shape))))
    # A host has 2 x 2 x 1 chips, except in a slice of one chip.
    options["chips_per_host_bounds"] = tuple(min(a, b) for a, b in zip((2, 2, 1), padded, strict=True))
    name = f"{chip.name}:{'x'.join(map(str, shape))}"
    try:
        with silenced():
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=name, num_slices=target.slices, **options
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the TPU compiler refuses {target.name} ({str(error).splitlines()[0]:.160}): give another"
            " topology"
        ) from error
    if len(topology.devices) != target.count:
        have = len(topology.devices)
        raise UserError(
            f"{target.name} has {have} devices for JAX, not {target.count}: give another topology"
        )
    return topology.devices


def find_libtpu() -> Path:
    """Returns the path of libtpu.so in the environment (as on a TPU VM), else in `TOOLS`."""
    given = os.environ.get("TPU_LIBRARY_PATH")
    if given and Path(given).is_file():
        return Path(given)
    spec = importlib.util.find_spec("libtpu")
    places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for place in (*places, TOOLS / "libtpu"):
        if (place / "libtpu.so").is_file():
            return place / "libtpu.so"
    raise UserError(
        "planning for TPUs compiles with libtpu, which is not installed:"
        f" {'run `make plan-tools`, or ' if clone() else ''}"
        f"`{pip_install('--no-deps', '--target', str(TOOLS), requirement())}`;"
        " or set TPU_LIBRARY_PATH to a libtpu.so"
    )


def requirement() -> str:
    """Returns pip's requirement of the libtpu that matches the installed JAX."""
    for line in importlib.metadata.requires("jax") or ():
        if match := re.match(r"libtpu\s*==\s*([\d.]+\*?)", line):
            return f"libtpu=={match[1]}"
    return "libtpu"
