"""The least time that a step can take: its products, its memory traffic and its collectives at full speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxir.costs.collectives import Collective
from jaxir.costs.targets import Target
from jaxir.costs.work import Work


class Roofline(NamedTuple):
    """Seconds of a step on each chip, were nothing else in the way.

    Attributes:
      compute: of its products at the chip's peak.
      vector: of its elementwise operations; None where they are not known.
      memory: of its traffic with HBM; None where that is not known.
      interconnect: of its collectives.
    """

    compute: float
    vector: float | None
    memory: float | None
    interconnect: float

    @property
    def parts(self) -> dict[str, float]:
        """The times that are known, by name."""
        named = {
            "matrix products": self.compute,
            "elementwise (approx.)": self.vector,
            "HBM": self.memory,
            "interconnect": self.interconnect,
        }
        return {name: seconds for name, seconds in named.items() if seconds is not None}

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def overlapped(self) -> float:
        """Seconds of a step in which everything happens at once."""
        return max(self.parts.values())

    @property
    def in_turn(self) -> float:
        """Seconds of a step in which one thing happens after the other."""
        return sum(self.parts.values())


def estimate(
    work: Work, collectives: Sequence[Collective], target: Target, devices: Sequence[jax.Device]
) -> Roofline:
    """Returns the times of a step.

    Args:
      work: of one chip; `vector` and `bytes` of 0 are not known.
      collectives: of the step.
      target: the chips.
      devices: the mesh's, in its order.
    """
    return Roofline(
        *work.seconds(target.chip),
        interconnect=sum(c.traffic / bandwidth(c.members, target, devices) for c in collectives),
    )


def bandwidth(members: Sequence[int], target: Target, devices: Sequence[jax.Device]) -> float:
    """Returns the bytes a second that each chip of a group can send to the others of it, one way.

    A TPU sends both ways round the rings of every torus dimension in which the group's chips differ, one way
    where the ends are not joined. A group over several slices or GPU nodes is bound by their network, to
    which all its chips of one slice or node contribute.
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
