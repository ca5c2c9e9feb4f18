"""The device mesh, and rules from logical axis names to mesh axes.

Models name the axes of parameters and activations as T5X does ("batch", "length", "embed", "mlp", "heads",
"joined_kv", "vocab", ...). A rule maps each name to mesh axes or to none. With no mesh in force every
constraint is the identity, so models also run in a notebook.
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

# The number of devices of a mesh axis; -1 means all devices that the other axes leave.
Devices = Count | Literal[-1]

# Name of gathered weights for `jax.checkpoint`.
GATHERED = "gathered_weight"
MESH_AXES = ("slices", "data", "fsdp", "tensor")

# Pairs (logical axis, mesh axes), in order of preference; see `Partitioner.spec`.
Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]
# All mesh axes except "tensor" split the "batch"; "fsdp" splits the "embed" of parameters.
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
      slices: groups of devices joined by a slow network (TPU slices over DCN, GPU nodes). They split the
        batch, but not parameters.
      data: devices of a slice that split only the batch; -1 takes all devices that the other axes leave.
      fsdp: devices that split the batch and the parameters (fully sharded data parallelism).
      tensor: devices that split heads and feed-forward units.
      rules: (logical axis, mesh axes) pairs that precede `DEFAULT_RULES`.
      fused_attention: whether TPUs compute attention and dense layers in kernels if possible
        (docs/planning.md).
      sparse_cores: whether the SparseCores of TPUs that have them (v5p, v6e) run collectives while the
        rest of the chip computes (docs/planning.md).
    """

    slices: Devices = 1
    data: Devices = -1
    fsdp: Devices = 1
    tensor: Devices = 1
    rules: Rules = ()
    fused_attention: bool = True
    sparse_cores: bool = False

    def build(self, devices: Sequence[jax.Device] | None = None) -> Partitioner:
        """Arranges `devices` (default: all) as [slices, data, fsdp, tensor].

        Raises:
          UserError: the sizes do not fit the number of devices or their slices, or a rule names an unknown
            axis.
        """
        if devices is None:
            check_devices()
        devices = jax.devices() if devices is None else list(devices)
        requested = {axis: getattr(self, axis) for axis in MESH_AXES}
        sizes = list(requested.values())
        if sizes.count(-1) > 1:
            raise UserError(f"at most one mesh size may be -1, not {requested}")
        known = math.prod(s for s in sizes if s != -1)
        if -1 in sizes and len(devices) % known == 0:
            sizes[sizes.index(-1)] = len(devices) // known
        if math.prod(sizes) != len(devices):
            raise UserError(f"the product of the mesh sizes {requested} must be {len(devices)}, all devices")
        rules = tuple((name, _axes(target)) for name, target in (*self.rules, *DEFAULT_RULES))
        for name, target in rules:
            if wrong := [a for a in target if a not in MESH_AXES]:
                raise UserError(
                    f"rule for {name!r}: unknown mesh axis {wrong[0]!r}; give some of {MESH_AXES}"
                )
        grid = _lay_out(devices, sizes)
        types = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
        mesh = Mesh(grid, MESH_AXES, axis_types=types)
        how = {"fused_attention": self.fused_attention, "sparse_cores": self.sparse_cores}
        return Partitioner(mesh=mesh, rules=rules, **how)


def _axes(target: str | Sequence[str] | None) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else tuple(target or ())


def _lay_out(devices: Sequence[jax.Device], sizes: Sequence[int]) -> np.ndarray:
    """Arranges devices so that the last axes have the fastest links and only `slices` crosses slices."""
    found = len({getattr(d, "slice_index", 0) for d in devices})
    if found > 1 and found == sizes[0]:
        inner, outer = (1, *sizes[1:]), (sizes[0], *(1 for _ in sizes[1:]))
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(sizes)
    if found != sizes[0]:
        raise UserError(f"mesh: the TPUs are in {found} slices; set slices to {found}, not {sizes[0]}")
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """A mesh with its rules."""

    mesh: Mesh
    rules: Rules = DEFAULT_RULES  # which mesh axes split a logical axis
    stand_in: bool = False  # whether the devices only represent others, as in a plan
    fused_attention: bool = True
    sparse_cores: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether programs will run on this machine's CPU."""
        return not self.stand_in and self.mesh.devices.flat[0].platform == "cpu"

    @property
    def on_tpu(self) -> bool:
        """Whether programs will run on TPUs, which may be the TPUs of a plan."""
        return self.mesh.devices.flat[0].platform == "tpu"

    def spec(self, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
        """Returns the PartitionSpec of an array with dimensions named `axes`; None: not split.

        Rules apply in order, as in T5X. Each rule gives its mesh axes to the first dimension of its name that
        has no mesh axes yet. A rule does not apply if another dimension has one of these axes or, if `shape`
        is given, they do not divide its size (a vocabulary of 30,522 over 4 devices). Then the next rule of
        that name applies.

        Raises:
          ValueError: a name without a rule, or another number of names than dimensions.
        """
        unknown = sorted({a for a in axes if a is not None} - {name for name, _ in self.rules})
        if unknown:
            known = sorted({name for name, _ in self.rules})
            raise ValueError(
                f"no rule for logical axes {unknown}; add one to MeshConfig.rules, which name {known}"
            )
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
        """Returns the sharding of an array with dimensions named `axes`; see `spec`."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def batch_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes that split the rows of a batch."""
        return _axes(self.spec(("batch",))[0])

    def batch_divisor(self) -> int:
        """Returns the number of devices that split the rows of a batch."""
        return math.prod(self.mesh.shape[n] for n in self.batch_axes())

    def without_batch_axes(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns `spec` without the mesh axes that split the batch: the sharding of a weight in use."""
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
    """Returns the partitioner in force, or None."""
    return _IN_FORCE.get()


def batch_shards(rows: int) -> int:
    """Returns the number of parts into which the partitioner in force splits `rows`; 1 if it cannot."""
    partitioner = _IN_FORCE.get()
    divisor = 1 if partitioner is None else partitioner.batch_divisor()
    return 1 if rows % divisor else divisor


def constrain(x: jax.Array, axes: Sequence[str | None], shape: Sequence[int] | None = None) -> jax.Array:
    """Constrains an activation to the sharding of `axes`, if a partitioner is in force.

    `shape` has the number of units to divide in each dimension if that is not the dimension's size: H for
    [..., H K].
    """
    partitioner = _IN_FORCE.get()
    if partitioner is None:
        return x
    return jax.lax.with_sharding_constraint(x, partitioner.sharding(axes, shape or x.shape))


def gather_weight(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Returns a weight, in the compute dtype, gathered along the mesh axes that split the batch (FSDP).

    A device gathers a layer's weights when they are used, and keeps only its part of their gradient.
    Without this constraint the compiler may move activations instead.
    """
    partitioner = _IN_FORCE.get()
    # On one device the result is x itself: a scan would keep a copy of any other value for its backward pass.
    if partitioner is None or partitioner.mesh.size == 1:
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
    """Returns the rows of a table [N, E] with ids [...], in `dtype`; NaN for ids outside the table.

    With a partitioner in force and ids [B, ...], each device sums the gradient of its rows of the batch in
    the table's dtype. The devices exchange these sums in `dtype`. Without this rule the compiler may exchange
    gradients of [B, L, E] activations.
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
    # For each dimension of the table: its axes that also split the batch, and the others.
    scattered = [tuple(n for n in _axes(part) if n in batch) for part in at_rest.spec]
    others = [tuple(n for n in _axes(part) if n not in partitioner.batch_axes()) for part in at_rest.spec]
    rows = table.shape[0] // math.prod(mesh.shape[n] for n in others[0])

    def of_own_rows(ids, gradient):
        first = jax.lax.axis_index(others[0]) * rows if others[0] else 0
        places = jnp.where(ids >= first, ids - first, rows)  # other rows are out of range: dropped
        total = jnp.zeros((rows, gradient.shape[-1]), table.dtype)
        total = total.at[places].add(gradient.astype(table.dtype), mode="drop")
        total = total.astype(dtype)  # the type in which devices exchange gradients of other weights, too
        for dimension, names in enumerate(scattered):
            if names:
                # Stack the parts along the first dimension: for a reduce-scatter along the last dimension,
                # the TPU compiler emits an all-reduce, which sends twice as much (docs/results/planning.md).
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
