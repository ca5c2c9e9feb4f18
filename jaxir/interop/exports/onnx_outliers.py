"""Dense layers whose input has a few channels of much larger numbers, which cost int8 the others' precision.

ONNX Runtime's quantiser gives all numbers of a layer's input one scale. In many encoders one or two units of
a feed-forward layer are five times as large as all others. Such channels get a small product of their own.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxir.models.operators import watched

CHANNELS = 8  # number of channels with their own product; further ones gain nothing for MiniLM
# The others must be smaller by this factor: then int8 has 1.6 more bits for them.
_UNEVEN = 3.0

_found = contextvars.ContextVar[Mapping[bytes, np.ndarray] | None]("_found", default=None)


def find(compute: Callable[[], Any]) -> dict[bytes, np.ndarray]:
    """Runs `compute`, without compiling it, on the model's arrays.

    Returns:
      for each kernel [I, O] with O <= I whose input has outliers, their numbers [CHANNELS], by the kernel's
      digest. For a wider output the second product would take longer than int8 saves.
    """
    largest: dict[bytes, np.ndarray] = {}

    def watch(name: str, arrays: tuple[Any, ...]) -> None:
        if name != "linear" or any(isinstance(a, jax.core.Tracer) for a in arrays):  # such as a scanned layer
            return
        x, kernel = np.asarray(arrays[0]), np.asarray(arrays[1])
        if kernel.shape[1] <= kernel.shape[0] > 2 * CHANNELS:
            of_channel, key = np.abs(x).reshape(-1, x.shape[-1]).max(0), _digest(kernel)
            largest[key] = np.maximum(of_channel, largest.get(key, 0))

    with watched(watch):
        compute()
    found = {}
    for key, of_channel in largest.items():
        order = np.argsort(of_channel)
        if of_channel[order[-1]] > _UNEVEN * of_channel[order[-CHANNELS - 1]]:
            found[key] = np.sort(order[-CHANNELS:])
    return found


@contextlib.contextmanager
def separated(found: Mapping[bytes, np.ndarray]) -> Iterator[None]:
    """Gives the channels that `find` returned their own product in graphs that are written meanwhile."""
    token = _found.set(found)
    try:
        yield
    finally:
        _found.reset(token)


def of_kernel(kernel: np.ndarray) -> np.ndarray | None:
    """Returns the numbers of the channels that have their own product, or None."""
    found = _found.get()
    return found.get(_digest(kernel)) if found else None


def _digest(kernel: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(kernel, np.float32).data).digest()
