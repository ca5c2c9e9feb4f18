"""What to change in a run that does not fit, by arithmetic from what is known of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from jaxir.costs.targets import Target
from jaxir.errors import UserError
from jaxir.models.layers import POLICIES, Remat
from jaxir.partitioning import MESH_AXES, MeshConfig, Partitioner

GIB = 2**30
# Where the arithmetic says that this share of the memory is used, a change counts as one that fits.
_ROOM = 0.92
# What the shipped recipes call the axes of the mesh (gin/runs/samtone_paper.gin).
MACROS = {"slices": "SLICES", "data": "MESH_DATA", "fsdp": "FSDP", "tensor": "TENSOR"}


class Setting(NamedTuple):
    """What may be changed.

    Attributes:
      fsdp: devices over which parameters are split.
      remat: what is recomputed of blocks in the backward pass.
      chunks: of gradient caching.
      batch_size: pairs of a step.
    """

    fsdp: int
    remat: Remat
    chunks: int
    batch_size: int

    def recomputing_more(self) -> list[Remat]:
        """Returns the ways that recompute more of a block, and keep less; to keep weights is none of them."""
        policies = [False, *POLICIES]
        return [p for p in policies[policies.index(self.remat) + 1 :] if p != "weights"]

    def changes(self, other: Setting) -> list[str]:
        """Returns what differs in `self` from `other`, as a user would say it."""
        pairs = zip(self._fields, self, other, strict=True)
        return [f"{name}={new}" for name, new, old in pairs if new != old]


class Costs(NamedTuple):
    """What a step needs on each chip with the setting at hand, in bytes.

    Attributes:
      state: parameters, optimizer state and gradients, all of which `fsdp` splits.
      activations: kept for the backward pass, by what is recomputed.
      rest: work space, which goes with the rows of a chunk.
      fixed: what no change here makes smaller.
    """

    state: float
    activations: Mapping[Remat, float]
    rest: float
    fixed: float

    def of(self, new: Setting, old: Setting, chips: float = 1.0) -> float:
        """Returns the bytes that a setting is thought to need, on `chips` times as many chips."""
        rows = new.batch_size / old.batch_size * old.chunks / new.chunks / chips
        of_rows = (self.activations[new.remat] + self.rest) * rows
        return self.state * old.fsdp / new.fsdp + of_rows + self.fixed


def suggest(
    setting: Setting, costs: Costs, *, limit: float, target: Target, fsdp: Sequence[int], divisor: int
) -> list[str]:
    """Returns lines of advice, the smallest changes first.

    Args:
      setting: of the run that does not fit.
      costs: of it.
      limit: bytes that each chip has.
      target: the chips.
      fsdp: sizes of the axis that the mesh allows.
      divisor: that the rows of a chunk must be a multiple of.
    """
    found: list[tuple[float, set[str], str]] = []
    for candidate in _candidates(setting, fsdp, divisor):
        wanted = costs.of(candidate, setting)
        changed = {n for n, a, b in zip(Setting._fields, candidate, setting, strict=True) if a != b}
        # More of what an earlier line already asks for is no news.
        if wanted > _ROOM * limit or any(other <= changed for _, other, _ in found):
            continue
        found.append((wanted, changed, ", ".join(candidate.changes(setting))))
    lines = [f"{words} (about {wanted / GIB:.1f} GiB on each chip)" for wanted, _, words in found[:4]]
    for larger, remat in itertools.product(target.larger(), (setting.remat, *setting.recomputing_more())):
        times = larger.count // target.count
        candidate = setting._replace(fsdp=setting.fsdp * times, remat=remat)
        wanted = costs.of(candidate, setting, times)
        if wanted <= _ROOM * limit and (setting.batch_size // setting.chunks) % (divisor * times) == 0:
            what = "a slice of " if larger.chip.kind == "tpu" else ""
            lines.append(
                f"{what}{larger.count} chips, --topology={larger.name}, with"
                f" {', '.join(candidate.changes(setting))} (about {wanted / GIB:.1f} GiB on each chip)"
            )
            break
    return lines or ["a chip with more memory: no change of these is thought to be enough"]


def build_mesh(mesh: MeshConfig, devices: Sequence[jax.Device], target: Target) -> Partitioner:
    """Lays out the devices of `target`.

    Raises:
      UserError: the mesh does not fit them; where other sizes do, the sentence names the macros to change.
    """
    try:
        return dataclasses.replace(mesh.build(devices), stand_in=True)
    except UserError as error:
        changes = mesh_changes(mesh, target)
        if not changes:
            raise
        macros = " ".join(f"--gin.{MACROS[axis]}={size}" for axis, size in changes.items())
        raise UserError(
            f"{error}: for {target.name} set {macros} (in a recipe without these macros"
            f" {' and '.join(f'partitioning.MeshConfig.{axis}' for axis in changes)})"
        ) from error


def mesh_changes(mesh: MeshConfig, target: Target) -> dict[str, int]:
    """Returns the sizes to change for a mesh to fit a target; fsdp and tensor keep as much as divides it."""
    slices = target.slices if target.chip.kind == "tpu" else math.gcd(max(mesh.slices, 1), target.count)
    left = target.count // slices
    tensor = math.gcd(max(mesh.tensor, 1), left)
    left //= tensor
    if mesh.fsdp == -1:
        data, fsdp = math.gcd(max(mesh.data, 1), left), -1
    else:
        fsdp = math.gcd(mesh.fsdp, left)
        data = mesh.data if mesh.data * fsdp == left else -1
    wanted = dict(zip(MESH_AXES, (slices, data, fsdp, tensor), strict=True))
    return {axis: size for axis, size in wanted.items() if size != getattr(mesh, axis)}


def _candidates(setting: Setting, fsdp: Sequence[int], divisor: int) -> Iterator[Setting]:
    """Yields settings with one change, then two, and so on; of one kind, the smallest change first."""
    rows = setting.batch_size // divisor
    parts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= rows and rows % n == 0]
    options: dict[str, list] = {
        "fsdp": [n for n in sorted(fsdp) if n > setting.fsdp],
        "remat": setting.recomputing_more(),
        "chunks": [n for n in parts if n > setting.chunks],
        "batch_size": [setting.batch_size // n for n in parts[1:] if rows % (n * setting.chunks) == 0],
    }
    for count in range(1, len(options) + 1):
        for names in itertools.combinations(options, count):
            for values in itertools.product(*(options[name] for name in names)):
                yield setting._replace(**dict(zip(names, values, strict=True)))
