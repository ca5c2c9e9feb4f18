"""Suggests changes to a run that does not fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxir.core.errors import UserError
from jaxir.costs.chips import CHIPS, SLICES
from jaxir.costs.targets import Target, parse
from jaxir.models.layers import POLICIES, Remat
from jaxir.planning.typed import MACROS
from jaxir.runtime.partitioning import MESH_AXES, MeshConfig, Partitioner

# A change is offered only if the step then uses at most this share of the memory.
_ROOM = 0.92
# Maximum numbers of changes: those offered, and those checked by tracing shapes (a second each).
_OFFERED, _CHECKED = 4, 24


class Setting(NamedTuple):
    """The settings that may be changed."""

    fsdp: int  # devices that split the parameters
    remat: Remat  # what the backward pass recomputes of each block
    chunks: int  # number of chunks of gradient caching
    batch_size: int  # pairs per step

    def recomputing_more(self) -> list[Remat]:
        """Returns the remat policies that keep less in memory than this one and work on any device."""
        policies = [False, *POLICIES]
        return [p for p in policies[policies.index(self.remat) + 1 :] if p not in ("weights", "kernels")]

    def changes(self, other: Setting) -> dict[str, Any]:
        """Returns the values of `self` that differ from the values of `other`, by name."""
        pairs = zip(self._fields, self, other, strict=True)
        return {name: new for name, new, old in pairs if new != old}


class Costs(NamedTuple):
    """Bytes that a step needs on each chip with the current setting."""

    state: float  # parameters, optimizer state and gradients, all split by `fsdp`
    activations: Mapping[Remat, float]  # bytes kept for the backward pass, by remat policy
    rest: float  # work space, proportional to the rows per chunk
    fixed: float  # bytes that no change here affects
    # Returns the bytes of a setting, without state and `fixed`, by tracing the step. Slower but more exact
    # than `of`, because the loss does not scale with the rows. None: use `of`.
    traced: Callable[[Setting], float] | None = None

    def of(self, new: Setting, old: Setting, chips: float = 1.0) -> float:
        """Returns the estimated bytes for a setting on `chips` times as many chips."""
        rows = new.batch_size / old.batch_size * old.chunks / new.chunks / chips
        of_rows = (self.activations[new.remat] + self.rest) * rows
        return self.state * old.fsdp / new.fsdp + of_rows + self.fixed

    def checked(self, new: Setting, old: Setting, chips: float = 1.0) -> float:
        """Like `of`, but computed by `traced` if it is set."""
        if self.traced is None:
            return self.of(new, old, chips)
        return self.state * old.fsdp / new.fsdp + self.traced(new) / chips + self.fixed


class Change(NamedTuple):
    """A suggested change."""

    words: str  # description for the user
    settings: dict[str, Any]  # new values by name, including axes of the mesh and "topology"
    size: float  # estimated bytes on each chip


def suggest(
    setting: Setting,
    costs: Costs,
    *,
    limit: float,
    target: Target,
    mesh: MeshConfig,
    fsdp: Sequence[int],
    divisor: int,
    can: Collection[str],
) -> list[Change]:
    """Returns changes of the settings named in `can` that make the step fit, smallest first.

    `fsdp` lists the sizes that mesh and model allow; the rows of a chunk must be a multiple of `divisor`.
    """
    found: list[Change] = []
    left = _CHECKED
    for candidate in _candidates(setting, fsdp, divisor, can):
        changes = candidate.changes(setting)
        # Skip changes that include a change that already fits.
        if any(other.settings.keys() <= changes.keys() for other in found):
            continue
        if costs.of(candidate, setting) > _ROOM * limit:
            continue
        left -= 1
        if (size := costs.checked(candidate, setting)) <= _ROOM * limit:
            found.append(Change(_words(changes), changes, size))
        if not left or len(found) == _OFFERED:
            break
    found = [_on(change, mesh, target) for change in found]
    ways = (setting.remat, *(setting.recomputing_more() if "remat" in can else ()))
    for larger, remat in itertools.product(target.larger() if "fsdp" in can else (), ways):
        times = larger.count // target.count
        candidate = setting._replace(fsdp=setting.fsdp * times, remat=remat)
        size = costs.of(candidate, setting, times)
        if size <= _ROOM * limit:
            size = costs.checked(candidate, setting, times)
        if size <= _ROOM * limit and (setting.batch_size // setting.chunks) % (divisor * times) == 0:
            what = "a slice of " if larger.chip.kind == "tpu" else ""
            words = f"{what}{larger.count} chips, {_words(candidate.changes(setting))}"
            change = Change(words, {"topology": larger.name} | candidate.changes(setting), size)
            found.append(_on(change, mesh, larger))
            break
    if not found:
        found = list(_on_larger_chips(setting, costs, target, mesh, ways))[:1]
    return [change for change in found if change.settings.keys() <= set(can)]


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _on(change: Change, mesh: MeshConfig, target: Target) -> Change:
    """Adds to a change the sizes of the mesh that the target needs."""
    wanted = dataclasses.replace(mesh, fsdp=change.settings.get("fsdp", mesh.fsdp))
    return change._replace(settings=change.settings | mesh_changes(wanted, target))


def _on_larger_chips(
    setting: Setting, costs: Costs, target: Target, mesh: MeshConfig, ways: Sequence[Remat]
) -> Iterator[Change]:
    """Yields changes to the same number of chips of a kind with more memory, smallest first."""
    for chip in sorted(CHIPS.values(), key=lambda chip: chip.memory):
        if chip.kind != target.chip.kind or chip.memory <= target.chip.memory:
            continue
        names = [f"gpu:{target.count}x{chip.name}"]
        if chip.kind == "tpu":
            names = [f"{chip.name}:{shape}" for shape in SLICES[chip.name]]
        same = [other for other in map(parse, names) if other.count == target.count]
        for other, remat in itertools.product(same, ways):
            candidate = setting._replace(remat=remat)
            if (size := costs.checked(candidate, setting)) <= _ROOM * chip.memory:
                changes = candidate.changes(setting)
                words = ", ".join(
                    [f"{other.count} {chip.name} chips", *([_words(changes)] if changes else [])]
                )
                # Remove --prices, which has prices of the present chips.
                settings = {"topology": other.name, "prices": None} | changes
                yield _on(Change(words, settings, size), mesh, other)


def build_mesh(mesh: MeshConfig, devices: Sequence[jax.Device], target: Target) -> Partitioner:
    """Lays out the devices of `target`; a UserError names the macros to change if the mesh does not fit."""
    try:
        return dataclasses.replace(mesh.build(devices), stand_in=True)
    except UserError as error:
        changes = mesh_changes(mesh, target)
        if not changes:
            raise
        macros = " ".join(f"--{MACROS[axis].lower()}={size}" for axis, size in changes.items())
        raise UserError(
            f"{error}: for {target.name} set {macros} (in a recipe without these macros"
            f" {' and '.join(f'partitioning.MeshConfig.{axis}' for axis in changes)})"
        ) from error


def mesh_changes(mesh: MeshConfig, target: Target) -> dict[str, int]:
    """Returns the sizes to change so that a mesh fits a target; keeps fsdp and tensor if possible."""
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


def _candidates(
    setting: Setting, fsdp: Sequence[int], divisor: int, can: Collection[str]
) -> Iterator[Setting]:
    """Yields settings with one change, then two, and so on; smallest changes of a kind first."""
    rows = setting.batch_size // divisor
    parts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= rows and rows % n == 0]
    options: dict[str, list] = {
        "fsdp": [n for n in sorted(fsdp) if n > setting.fsdp],
        "remat": setting.recomputing_more(),
        "chunks": [n for n in parts if n > setting.chunks],
        "batch_size": [setting.batch_size // n for n in parts[1:] if rows % (n * setting.chunks) == 0],
    }
    options = {name: values for name, values in options.items() if name in can}
    for count in range(1, len(options) + 1):
        for names in itertools.combinations(options, count):
            for values in itertools.product(*(options[name] for name in names)):
                yield setting._replace(**dict(zip(names, values, strict=True)))
