"""The ring of the devices that split a batch: passages go from device to device, queries stay."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh

from jaxir.runtime import partitioning


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices that split the batch, in the order of its shards."""

    mesh: Mesh
    axes: str | tuple[str, ...]

    @property
    def size(self) -> int:
        names = (self.axes,) if isinstance(self.axes, str) else self.axes
        return math.prod(self.mesh.shape[n] for n in names)

    def pass_on(self, x: Any, distance: int) -> Any:
        """Sends a device's arrays to the device that is `distance` further in the ring."""
        pairs = [(d, (d + distance) % self.size) for d in range(self.size)]
        return jax.lax.ppermute(x, self.axes, pairs)


def ring_for(rows: int) -> Ring | None:
    """Returns the ring of the partitioner in force; None if it does not split `rows`."""
    partitioner = partitioning.in_force()
    if partitioner is None:
        return None
    axes = partitioner.spec(("batch",), (rows,))[0]
    if axes is None:
        return None
    ring = Ring(partitioner.mesh, axes)
    return ring if ring.size > 1 else None
