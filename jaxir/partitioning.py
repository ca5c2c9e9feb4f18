"""Where arrays live: a device mesh and the rules from logical axis names to its axes.

Models name the axes of their parameters and activations in T5X's terms ("batch", "length", "embed", "mlp",
"heads", "joined_kv", "vocab", ...); a rule maps each name to mesh axes or to none. Nothing here knows a
model.
With no mesh in force every constraint is the identity, so a model runs in a notebook as it is.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxir.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")

# (logical axis, mesh axes). "batch" lies over every axis that holds data; "embed" is what FSDP splits.
Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]
DEFAULT_RULES: Rules = (
    ("batch", ("data", "fsdp")),
    ("length", None),
    ("activation_embed", None),
    ("embed", "fsdp"),
    ("mlp", "tensor"),
    ("heads", "tensor"),
    ("joined_kv", "tensor"),
    ("vocab", "tensor"),
    ("kv", None),
    ("relpos_buckets", None),
    ("position", None),
    ("affinity", None),
    ("layers", None),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The shape of the device mesh.

    Attributes:
      data: devices over which only the batch is split; -1 takes all that the other axes leave.
      fsdp: devices over which the batch and the parameters are split (fully sharded data parallelism).
      tensor: devices over which heads and feed-forward units are split.
      rules: logical axis to mesh axes.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    rules: Rules = DEFAULT_RULES

    def build(self, devices: Sequence[jax.Device] | None = None) -> Partitioner:
        """Lays `devices` (default: all) out as [data, fsdp, tensor].

        Raises:
          UserError: the sizes do not multiply to the number of devices.
        """
        devices = jax.devices() if devices is None else list(devices)
        asked = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        sizes = list(asked.values())
        if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
            raise UserError(f"mesh sizes must be positive, with at most one -1; got {asked}")
        known = int(np.prod([s for s in sizes if s != -1]))
        if -1 in sizes and len(devices) % known == 0:
            sizes[sizes.index(-1)] = len(devices) // known
        if int(np.prod(sizes)) != len(devices):
            raise UserError(f"mesh {asked} does not cover {len(devices)} devices exactly")
        grid = jax.make_mesh(
            tuple(sizes),
            MESH_AXES,
            devices=devices,
            axis_types=(jax.sharding.AxisType.Auto,) * len(MESH_AXES),
        )
        return Partitioner(mesh=grid, rules=tuple(self.rules))


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """A mesh with its rules."""

    mesh: Mesh
    rules: Rules = DEFAULT_RULES

    def spec(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions are named `axes`.

        Args:
          axes: one logical name per dimension; None leaves the dimension whole.
          shape: the array's shape, where known: then a dimension that its mesh axes do not divide evenly (a
            vocabulary of 30,522 over 4 devices), or whose mesh axes an earlier dimension took, is left whole.

        Raises:
          ValueError: a name that no rule maps, or another number of names than dimensions.
        """
        table = dict(self.rules)
        unknown = [a for a in axes if a is not None and a not in table]
        if unknown:
            raise ValueError(f"no rule for logical axes {unknown}; rules name {sorted(table)}")
        targets = [None if a is None else table[a] for a in axes]
        if shape is None:
            return PartitionSpec(*targets)
        taken: set[str] = set()
        fitting: list[str | tuple[str, ...] | None] = []
        for target, size in zip(targets, shape, strict=True):
            names = (target,) if isinstance(target, str) else target or ()
            fits = size % math.prod(self.mesh.shape[n] for n in names) == 0 and taken.isdisjoint(names)
            fitting.append(target if fits else None)
            taken.update(names if fits else ())
        return PartitionSpec(*fitting)

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> NamedSharding:
        """Returns the sharding of an array whose dimensions are named `axes`; see `spec`."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def batch_divisor(self) -> int:
        """Returns the number that a batch must be a multiple of: the devices that split its rows."""
        targets = dict(self.rules)["batch"] or ()
        return math.prod(self.mesh.shape[n] for n in ((targets,) if isinstance(targets, str) else targets))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Puts this partitioner in force for `constrain` while tracing."""
        token = _IN_FORCE.set(self)
        try:
            yield
        finally:
            _IN_FORCE.reset(token)


# Of a thread, for programs are traced in several at once.
_IN_FORCE: contextvars.ContextVar[Partitioner | None] = contextvars.ContextVar("partitioner", default=None)


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Constrains an activation to the sharding of `axes` under the partitioner in force, if there is one."""
    partitioner = _IN_FORCE.get()
    if partitioner is None:
        return x
    return jax.lax.with_sharding_constraint(x, partitioner.sharding(axes, x.shape))
