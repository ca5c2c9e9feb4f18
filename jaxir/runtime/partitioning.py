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
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxir.core.errors import UserError
from jaxir.core.platforms import check_devices
from jaxir.core.values import Count, checked

# -1 takes all that the other axes leave.
Devices = Count | Literal[-1]

# The name, for `jax.checkpoint`, of weights that were gathered from several devices.
GATHERED = "gathered_weight"
MESH_AXES = ("slices", "data", "fsdp", "tensor")

# (logical axis, mesh axes), in order of preference; see `Partitioner.spec`.
Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]
# "batch" lies over every axis that holds data; "embed" is what FSDP splits.
DEFAULT_RULES: Rules = (
    ("batch", ("slices", "data", "fsdp")),
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
@checked
class MeshConfig:
    """The shape of the device mesh.

    Attributes:
      slices: groups of devices joined by a slow network (TPU slices over DCN, GPU nodes). The batch is split
        over them, parameters are not.
      data: devices of a slice over which only the batch is split; -1 takes all that the other axes leave.
      fsdp: devices over which the batch and the parameters are split (fully sharded data parallelism).
      tensor: devices over which heads and feed-forward units are split.
      rules: (logical axis, mesh axes) pairs that go before `DEFAULT_RULES`.
      fused_attention: whether TPUs run attention as one kernel where it can be (docs/planning.md).
      sparse_cores: whether the SparseCores of TPUs that have some (v5p, v6e) send and receive, while the rest
        of the chip computes (docs/planning.md).
    """

    slices: Devices = 1
    data: Devices = -1
    fsdp: Devices = 1
    tensor: Devices = 1
    rules: Rules = ()
    fused_attention: bool = True
    sparse_cores: bool = False

    def build(self, devices: Sequence[jax.Device] | None = None) -> Partitioner:
        """Lays `devices` (default: all) out as [slices, data, fsdp, tensor].

        Raises:
          UserError: the sizes do not multiply to the number of devices, they do not fit the slices that the
            devices lie in, or a rule names a mesh axis that there is not.
        """
        if devices is None:
            check_devices()
        devices = jax.devices() if devices is None else list(devices)
        asked = {axis: getattr(self, axis) for axis in MESH_AXES}
        sizes = list(asked.values())
        if sizes.count(-1) > 1:
            raise UserError(f"of the mesh sizes at most one may be -1; got {asked}")
        known = math.prod(s for s in sizes if s != -1)
        if -1 in sizes and len(devices) % known == 0:
            sizes[sizes.index(-1)] = len(devices) // known
        if math.prod(sizes) != len(devices):
            raise UserError(f"mesh {asked} does not cover {len(devices)} devices exactly")
        rules = tuple((name, _axes(target)) for name, target in (*self.rules, *DEFAULT_RULES))
        for name, target in rules:
            if wrong := [a for a in target if a not in MESH_AXES]:
                raise UserError(f"rule for {name!r}: no mesh axis {wrong[0]!r}; there are {MESH_AXES}")
        grid = _lay_out(devices, sizes)
        types = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
        mesh = Mesh(grid, MESH_AXES, axis_types=types)
        how = {"fused_attention": self.fused_attention, "sparse_cores": self.sparse_cores}
        return Partitioner(mesh=mesh, rules=rules, **how)


def _axes(target: str | Sequence[str] | None) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else tuple(target or ())


def _lay_out(devices: Sequence[jax.Device], sizes: Sequence[int]) -> np.ndarray:
    """Arranges devices so that the fastest links lie along the last axes and only `slices` crosses slices."""
    found = len({getattr(d, "slice_index", 0) for d in devices})
    if found > 1 and found == sizes[0]:
        inner, outer = (1, *sizes[1:]), (sizes[0], *(1 for _ in sizes[1:]))
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(sizes)
    if found != sizes[0]:
        raise UserError(f"mesh: the TPUs lie in {found} slices; set slices to {found}, not {sizes[0]}")
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """A mesh with its rules.

    Attributes:
      mesh: the devices.
      rules: which mesh axes split a logical axis.
      stand_in: whether the devices only stand for others, as in a plan.
      fused_attention: as MeshConfig has it.
      sparse_cores: likewise.
    """

    mesh: Mesh
    rules: Rules = DEFAULT_RULES
    stand_in: bool = False
    fused_attention: bool = True
    sparse_cores: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether programs will run on this machine's CPU."""
        return not self.stand_in and self.mesh.devices.flat[0].platform == "cpu"

    @property
    def on_tpu(self) -> bool:
        """Whether programs will run on TPUs, those of a plan too."""
        return self.mesh.devices.flat[0].platform == "tpu"

    def spec(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions are named `axes`.

        Rules are tried in their order, as in T5X: each gives its mesh axes to the first dimension of its name
        that has none yet, unless another dimension has one of them or, where `shape` is known, they do not
        divide its size evenly (a vocabulary of 30,522 over 4 devices). Then the next rule of that name, if
        there is one, gets its turn. A rule without mesh axes settles that the dimension stays whole.

        Args:
          axes: one logical name per dimension; None leaves the dimension whole.
          shape: the array's shape, where known.

        Raises:
          ValueError: a name that no rule maps, or another number of names than dimensions.
        """
        unknown = sorted({a for a in axes if a is not None} - {name for name, _ in self.rules})
        if unknown:
            known = sorted({name for name, _ in self.rules})
            raise ValueError(f"no rule for logical axes {unknown}; rules name {known}")
        if shape is not None and len(shape) != len(axes):
            raise ValueError(f"{len(axes)} axis names for {len(shape)} dimensions: {axes}, {shape}")
        chosen: dict[int, tuple[str, ...]] = {}
        taken: set[str] = set()
        for name, target in self.rules:
            names = _axes(target)
            size = math.prod(self.mesh.shape[n] for n in names)
            for i, axis in enumerate(axes):
                fits = taken.isdisjoint(names) and (shape is None or shape[i] % size == 0)
                if axis == name and i not in chosen and fits:
                    chosen[i] = names
                    taken.update(names)
        parts = (chosen.get(i, ()) for i in range(len(axes)))
        return PartitionSpec(*((p[0] if len(p) == 1 else p or None) for p in parts))

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> NamedSharding:
        """Returns the sharding of an array whose dimensions are named `axes`; see `spec`."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def batch_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes over which the rows of a batch are split."""
        return _axes(self.spec(("batch",))[0])

    def batch_divisor(self) -> int:
        """Returns the number that a batch must be a multiple of: the devices that split its rows."""
        return math.prod(self.mesh.shape[n] for n in self.batch_axes())

    def without_batch_axes(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns `spec` without the mesh axes that split the batch: where a weight lies while it is used."""
        kept = (tuple(n for n in _axes(part) if n not in self.batch_axes()) for part in spec)
        return PartitionSpec(*((k[0] if len(k) == 1 else k or None) for k in kept))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Puts this partitioner in force for `constrain` while tracing."""
        token = _IN_FORCE.set(self)
        try:
            yield
        finally:
            _IN_FORCE.reset(token)


# Thread-local: several programs may be traced at once.
_IN_FORCE: contextvars.ContextVar[Partitioner | None] = contextvars.ContextVar("partitioner", default=None)


def in_force() -> Partitioner | None:
    """Returns the partitioner in force, None where there is none."""
    return _IN_FORCE.get()


def batch_shards(rows: int) -> int:
    """Returns into how many parts the partitioner in force splits a batch of `rows`; 1 if it splits none."""
    partitioner = _IN_FORCE.get()
    divisor = 1 if partitioner is None else partitioner.batch_divisor()
    return 1 if rows % divisor else divisor


def constrain(x: jax.Array, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> jax.Array:
    """Constrains an activation to the sharding of `axes` under the partitioner in force, if there is one.

    Args:
      x: any array.
      axes: the logical names of its dimensions.
      shape: into how many a dimension can be cut, where not into its size: H for [..., H K].
    """
    partitioner = _IN_FORCE.get()
    if partitioner is None:
        return x
    return jax.lax.with_sharding_constraint(x, partitioner.sharding(axes, shape or x.shape))


def gather_weight(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Returns a weight as computing wants it: whole along the mesh axes that split the batch.

    This is FSDP: a device gathers a layer's weights when it needs them, and keeps its own part of their
    gradient. Left to itself the compiler may move activations to the weights instead. Identity with no
    partitioner in force.

    Args:
      x: a parameter (or a layer of a stack), in the type that it is computed with.
      axes: the logical names of its dimensions.
    """
    partitioner = _IN_FORCE.get()
    if partitioner is None:
        return x
    at_rest = partitioner.sharding(axes, x.shape)
    in_use = NamedSharding(partitioner.mesh, partitioner.without_batch_axes(at_rest.spec))
    gathered = _gather(x, at_rest, in_use)
    return gathered if at_rest.is_equivalent_to(in_use, x.ndim) else checkpoint_name(gathered, GATHERED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, at_rest: NamedSharding, in_use: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, at_rest), in_use)


def _gather_forward(x, at_rest, in_use):
    return _gather(x, at_rest, in_use), None


def _gather_backward(at_rest, in_use, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, at_rest),)


_gather.defvjp(_gather_forward, _gather_backward)


def look_up(table: jax.Array, ids: jax.Array, axes: tuple[str | None, str | None], dtype: Any) -> jax.Array:
    """Returns the rows of a table [N, E] with the given ids [...], in `dtype`; NaN for an id outside it.

    With a partitioner in force and ids [B, ...], each device adds up the gradient of its own rows of the
    batch in the table's type, and what the devices exchange are those sums, in `dtype`: left to itself the
    compiler may exchange the gradients of [B, L, E] activations.
    """
    partitioner = _IN_FORCE.get()
    if partitioner is None or ids.ndim < 2 or len(ids) % partitioner.batch_divisor():
        return jnp.take(gather_weight(table, axes), ids, axis=0).astype(dtype)
    return _look_up(table, ids, partitioner, axes, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _look_up(table, ids, partitioner, axes, dtype):
    return jnp.take(gather_weight(table.astype(dtype), axes), ids, axis=0)


def _look_up_forward(table, ids, partitioner, axes, dtype):
    return _look_up(table, ids, partitioner, axes, dtype), (table, ids)


def _look_up_backward(partitioner, axes, dtype, kept, gradient):
    table, ids = kept
    mesh, at_rest = partitioner.mesh, partitioner.sharding(axes, table.shape)
    batch = tuple(n for n in partitioner.batch_axes() if mesh.shape[n] > 1)
    # Of each dimension of the table: the axes that also split the batch, and the others.
    scattered = [tuple(n for n in _axes(part) if n in batch) for part in at_rest.spec]
    others = [tuple(n for n in _axes(part) if n not in partitioner.batch_axes()) for part in at_rest.spec]
    rows = table.shape[0] // math.prod(mesh.shape[n] for n in others[0])

    def of_own_rows(ids, gradient):
        first = jax.lax.axis_index(others[0]) * rows if others[0] else 0
        places = jnp.where(ids >= first, ids - first, rows)  # beyond the last: dropped
        total = jnp.zeros((rows, gradient.shape[-1]), table.dtype)
        total = total.at[places].add(gradient.astype(table.dtype), mode="drop")
        total = total.astype(dtype)  # what is exchanged, as of the gradients of other weights
        for dimension, names in enumerate(scattered):
            if names:
                # The parts one below another first: of many a reduce-scatter along the last dimension TPU's
                # compiler makes an all-reduce, which sends twice as much (docs/results/planning.md).
                parts = jnp.split(total, math.prod(mesh.shape[n] for n in names), axis=dimension)
                total = jax.lax.psum_scatter(jnp.concatenate(parts), names, scatter_dimension=0, tiled=True)
        whole = tuple(n for n in batch if not any(n in names for names in scattered))
        return (jax.lax.psum(total, whole) if whole else total).astype(table.dtype)

    whole = (None,) * (ids.ndim - 1)
    parts = [o + s or None for o, s in zip(others, scattered, strict=True)]
    summed = jax.shard_map(
        of_own_rows,
        mesh=mesh,
        in_specs=(PartitionSpec(batch), PartitionSpec(batch, *whole, others[1] or None)),
        out_specs=PartitionSpec(*parts),
    )(ids, gradient)
    return jax.lax.with_sharding_constraint(summed, at_rest), None


_look_up.defvjp(_look_up_forward, _look_up_backward)
