"""The devices of JAX_PLATFORMS, and the error message if this machine does not have them."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install

if TYPE_CHECKING:  # because importing JAX is slow, and every command imports this file
    import jax

_CUDA = ("cuda", ("jax_cuda13_plugin", "jax_cuda12_plugin"), "NVIDIA GPU")
# Platform -> the extra of pyproject.toml, the modules that it installs (one is enough), the device.
_PLATFORMS = {"cuda": _CUDA, "gpu": _CUDA, "tpu": ("tpu", ("libtpu",), "TPU")}
_OTHERS = ("cpu", "rocm", "oneapi", "METAL", "mps")
_UNSET = "unset JAX_PLATFORMS to use what this machine has"


def missing_device(error: BaseException) -> str | None:
    """Returns the message for a device that JAX did not find; None if `error` has another cause."""
    if not _is_of_initialization(error):
        return None
    import jax

    wanted = jax.config.jax_platforms or ""
    for name in wanted.split(","):
        if name in _PLATFORMS:
            extra, modules, device = _PLATFORMS[name]
            if any(importlib.util.find_spec(module) for module in modules):
                why = f"JAX finds none{_reason(error)}; check the device and its driver"
            else:
                why = f"JAX cannot use one without the extra {extra!r}; install it: {how_to_install(extra)}"
            return f"JAX_PLATFORMS={wanted} requests a device ({device}) that is missing: {why}; or {_UNSET}"
    if unknown := [name for name in wanted.split(",") if name not in _OTHERS]:
        return f"JAX_PLATFORMS={wanted}: {unknown[0]!r} is not one of cpu, cuda and tpu; {_UNSET}"
    return f"JAX_PLATFORMS={wanted} requests a device that is missing{_reason(error)}; {_UNSET}"


def check_devices() -> None:
    """Raises a UserError if JAX has no device of the platform that JAX_PLATFORMS names."""
    import jax

    try:
        jax.local_devices()
    except Exception as error:
        sentence = missing_device(error)
        if sentence is None:
            raise
        raise UserError(sentence) from error


def local_devices() -> list[jax.Device]:
    """Returns the devices of this process after `check_devices`."""
    import jax

    check_devices()
    return jax.local_devices()


def memory_of(device: jax.Device) -> int | None:
    """Returns a device's memory in bytes, None if unknown; CPU devices share the machine's memory equally."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform != "cpu":
        return None
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // device.client.local_device_count()


def _is_of_initialization(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        return str(error).startswith("Unable to initialize backend")
    if not isinstance(error, AssertionError) or str(error) or "jax" not in sys.modules:
        return False
    # Without a backend, JAX 0.10 raises an AssertionError without a message and without its own frames.
    try:
        sys.modules["jax"].local_devices()
    except (AssertionError, RuntimeError):
        return True
    return False


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0]
    return f" ({text:.200})" if text else ""
