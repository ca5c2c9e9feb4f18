"""Roofline of a step: the least time for its products, memory traffic and collectives at full speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxir.costs.collectives import Collective
from jaxir.costs.targets import Target
from jaxir.costs.work import Work


class Roofline(NamedTuple):
    """Seconds that each kind of work of a step takes on a chip, if no other work runs, at full speed."""

    compute: float  # seconds of matrix products
    vector: float | None  # seconds of elementwise operations; None if unknown
    memory: float | None  # seconds of HBM traffic; None if unknown
    interconnect: float  # seconds of collectives

    @property
    def parts(self) -> dict[str, float]:
        """The known times by name."""
        named = {
            "matrix products": self.compute,
            "elementwise (approx.)": self.vector,
            "HBM": self.memory,
            "interconnect": self.interconnect,
        }
        return {name: seconds for name, seconds in named.items() if seconds is not None}

    @property
    def bound(self) -> str:
        """The name of the longest part."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def overlapped(self) -> float:
        """Seconds if everything overlaps."""
        return max(self.parts.values())

    @property
    def in_turn(self) -> float:
        """Seconds if nothing overlaps."""
        return sum(self.parts.values())


def estimate(
    work: Work, collectives: Sequence[Collective], target: Target, devices: Sequence[jax.Device]
) -> Roofline:
    """Returns the roofline of a step, from the work of one chip; 0 `vector` or `bytes` means unknown."""
    return Roofline(
        *work.seconds(target.chip),
        interconnect=sum(c.traffic / bandwidth(c.members, target, devices) for c in collectives),
    )


def bandwidth(members: Sequence[int], target: Target, devices: Sequence[jax.Device]) -> float:
    """Returns the bytes a second, one way, that each chip of a group can send within the group.

    A TPU uses the rings of all torus dimensions in which the chips differ, in both directions if the ends
    are joined. A group over several slices or GPU nodes is limited by their network, which all its chips
    share.
    """
    chip = target.chip
    if chip.kind == "gpu":
        nodes = {member // chip.node for member in members}
        inside, outside = chip.link_bandwidth, chip.network_bandwidth * len(members) / len(nodes)
        return inside if len(nodes) == 1 else min(inside, outside)
    group = [devices[member] for member in members]
    slices = {getattr(device, "slice_index", 0) for device in group}
    if len(slices) > 1:
        return chip.network_bandwidth * len(group) / len(slices)
    places = np.array([device.coords[: len(target.shape)] for device in group])
    varying = (places != places[:1]).any(axis=0)
    rings = zip(varying, chip.wraps(target.shape), strict=True)
    return chip.link_bandwidth * sum(2 if wrapped else 1 for differs, wrapped in rings if differs)
