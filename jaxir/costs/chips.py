"""Published figures of accelerators.

Peak rates are for dense bfloat16 products. Bandwidths are bytes a second, one way, out of one chip.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

GB, GIB, TERA = 1e9, 2**30, 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator, as JAX counts devices."""

    name: str  # name as the user writes it
    kind: Literal["tpu", "gpu"]
    memory: float  # bytes of high-bandwidth memory available to a program
    flops: float  # bfloat16 operations a second; a multiply-add counts as two
    memory_bandwidth: float  # bytes a second between memory and chip
    # Bytes a second, one way, over a link to a neighbour in a TPU's torus, or from a GPU to its node.
    link_bandwidth: float
    network_bandwidth: float  # bytes a second out of a chip to other slices or nodes
    vector_rate: float  # elementwise operations a second outside the matrix units; approximate
    torus: int = 0  # dimensions of a TPU's torus, each with two links a chip; 0 for a GPU
    node: int = 0  # number of GPUs joined by fast links; 0 for a TPU
    precise_passes: float = 6.0  # cost of a float32 product of highest precision, in bfloat16 products
    single_passes: float = 1.0  # cost of a float32 product of default precision, in bfloat16 products

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns, for each dimension of a slice, whether its ends are joined.

        v4 and v5p join all dimensions if all are multiples of 4. v5e and v6e join a dimension of size 16.
        """
        if self.torus == 3:
            return (all(size % 4 == 0 for size in shape),) * len(shape)
        return tuple(size == 16 for size in shape)


# Sources for TPUs. Memory is what libtpu 0.0.42 reports; the published sizes are 32, 16, 95 and 32 GB. Peak
# rates and memory bandwidth are from cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}.
# Link bandwidth (nine tenths of the published 50 and 100 GB/s), network bandwidth (approximate) and vector
# rate: "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus). A core's vector unit has 8 x 128 lanes
# of 4 units (two on v4) at 1.05 to 1.75 GHz; v4 and v5p have two cores.
# A float32 product of highest precision is six bfloat16 passes (XLA's bf16_6x algorithm).
# name: (memory in GiB, bfloat16 TFLOP/s, GB/s of memory, of a link and of the network, vector TFLOP/s, torus)
_TPUS = (
    ("v4", 30.75, 275, 1200, 45, 6.25, 4.3, 3),
    ("v5e", 15.75, 197, 819, 45, 3.125, 6.1, 2),
    ("v5p", 95.74, 459, 2765, 90, 6.25, 14.3, 3),
    ("v6e", 31.25, 918, 1640, 90, 12.5, 7.2, 2),
)

# Sources for GPUs: NVIDIA's data sheets of SXM boards (A100 80 GB, H100, H200), DGX B200, and L4 and L40S on
# PCIe 4.0 x16. Rates are dense; link bandwidth is half of NVLink's two-way figure.
# Memory is the published size. Programs can use about as much if XLA may use all memory; by default it may
# use three quarters (XLA_PYTHON_CLIENT_MEM_FRACTION).
# Network bandwidth is approximate: one 400 Gb/s adapter a GPU (DGX H100, H200, B200), 200 Gb/s (DGX A100),
# 100 Gb/s shared by the node (L4, L40S).
# An elementwise operation is half of a float32 multiply-add. A float32 product runs at the float32 peak at
# highest precision, and in TF32, half the bfloat16 rate, at default precision.
# name: (memory in GB, bfloat16 and float32 TFLOP/s, GB/s of memory, NVLink or PCIe, and network)
_GPUS = (
    ("a100", 80, 312, 19.5, 2039, 300, 25),
    ("h100", 80, 989, 67, 3350, 450, 50),
    ("h200", 141, 989, 67, 4800, 450, 50),
    ("b200", 180, 2250, 75, 8000, 900, 50),
    ("l4", 24, 121, 30, 300, 32, 1.6),
    ("l40s", 48, 362, 92, 864, 32, 1.6),
)

CHIPS = {
    name: Chip(
        name=name,
        kind="tpu",
        memory=memory * GIB,
        flops=tera * TERA,
        memory_bandwidth=bandwidth * GB,
        link_bandwidth=link * GB,
        network_bandwidth=network * GB,
        vector_rate=vector * TERA,
        torus=torus,
    )
    for name, memory, tera, bandwidth, link, network, vector, torus in _TPUS
} | {
    name: Chip(
        name=name,
        kind="gpu",
        memory=memory * GB,
        flops=tera * TERA,
        memory_bandwidth=bandwidth * GB,
        link_bandwidth=link * GB,
        network_bandwidth=network * GB,
        vector_rate=single / 2 * TERA,
        node=8,
        precise_passes=tera / single,
        single_passes=2.0,
    )
    for name, memory, tera, single, bandwidth, link, network in _GPUS
}

# `Device.device_kind` of a TPU -> jaxir's name. A GPU's device kind contains jaxir's name of that GPU.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def of_kind(device_kind: str) -> Chip | None:
    """Returns the chip with this `Device.device_kind`; None if unknown."""
    words = [_KINDS.get(device_kind), *re.split(r"[ -]", device_kind.lower())]
    return next((CHIPS[word] for word in words if word in CHIPS), None)


# Slices that Google Cloud offers, smallest first.
SLICES = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v4": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
}
