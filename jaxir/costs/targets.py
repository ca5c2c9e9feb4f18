"""What a plan is made for, or a run runs on: a TPU slice or a number of GPUs, by name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxir.costs.chips import CHIPS, SLICES, Chip, of_kind
from jaxir.errors import UserError, suggest

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Accelerators of one kind.

    Attributes:
      name: as the user wrote it.
      chip: what each of them is.
      shape: of a TPU slice's torus, in chips; the number of GPUs.
      slices: TPU slices joined by the data-centre network, or GPU nodes.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def count(self) -> int:
        """Chips in all."""
        return math.prod(self.shape) * (self.slices if self.chip.kind == "tpu" else 1)

    def larger(self) -> list[Target]:
        """Returns targets of the same chip with more of them, smallest first."""
        if self.chip.kind == "gpu":
            counts = [self.count * k for k in (2, 4, 8, 16)]
            whole = [n for n in counts if n <= self.chip.node or n % self.chip.node == 0]
            return [parse(f"gpu:{n}x{self.chip.name}") for n in whole]
        found = [parse(f"{self.chip.name}:{shape}") for shape in SLICES[self.chip.name]]
        return [target for target in found if target.count > self.count]


def of_devices(devices: Sequence[jax.Device]) -> Target | None:
    """Returns what devices that are there make up: slices of one shape, or GPUs; None of unknown chips."""
    chip, count = of_kind(devices[0].device_kind), len(devices)
    if chip is None:
        return None
    if chip.kind == "gpu":
        return Target(
            name=f"gpu:{count}x{chip.name}", chip=chip, shape=(count,), slices=-(-count // chip.node)
        )
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    places = zip(*(device.coords[: chip.torus] for device in devices), strict=True)
    shape = tuple(max(along) - min(along) + 1 for along in places)
    name = f"{chip.name}:{'x'.join(map(str, shape))}" + (f"*{slices}" if slices > 1 else "")
    return Target(name=name, chip=chip, shape=shape, slices=slices)


MOST_GPUS = 2048  # XLA's CPU client, whose devices stand in for GPUs, takes later ones for another process's
MOST_SLICES = 4096  # the TPU compiler makes an object for each chip of each slice


def parse(text: str) -> Target:
    """Reads "v5p:4x4x4", "v5e:4x4*2" (two slices) or "gpu:8xh100".

    Raises:
      UserError: there is no such chip, or the shape is not one of its slices.
    """
    tpus = [name for name, chip in CHIPS.items() if chip.kind == "tpu"]
    gpus = [name for name, chip in CHIPS.items() if chip.kind == "gpu"]
    kind, _, rest = text.strip().lower().partition(":")
    if kind == "gpu":
        match = re.fullmatch(r"([1-9]\d*)x([a-z]\w*)", rest)
        if match is None or match[2] not in gpus:
            near = suggest(match[2], gpus) if match else ""
            raise UserError(
                f"--topology={text}: GPUs are written gpu:NUMBERxCHIP, with CHIP one of {', '.join(gpus)}"
                f"{near}"
            )
        chip, count = CHIPS[match[2]], int(match[1])
        if count > MOST_GPUS:
            raise UserError(f"--topology={text}: plans are for at most {MOST_GPUS:,} GPUs; give fewer")
        if count > chip.node and count % chip.node:
            raise UserError(f"--topology={text}: {count} GPUs do not fill nodes of {chip.node}")
        return Target(name=f"gpu:{rest}", chip=chip, shape=(count,), slices=-(-count // chip.node))
    if kind not in tpus:
        raise UserError(
            f"--topology={text}: no chip {kind!r}{suggest(kind, [*tpus, 'gpu'])}; write CHIP:SHAPE with"
            f" {', '.join(tpus)}, such as v5p:4x4x4, or gpu:8xh100"
        )
    match = re.fullmatch(r"(\d+(?:x\d+){1,2})(?:\*([1-9]\d*))?", rest)
    known = SLICES[kind]
    if match is None or match[1] not in known:
        raise UserError(f"--topology={text}: no such slice of {kind}; there are {', '.join(known)}")
    shape = tuple(int(part) for part in match[1].split("x"))
    slices = int(match[2] or 1)
    if slices > MOST_SLICES:
        raise UserError(f"--topology={text}: plans are for at most {MOST_SLICES:,} slices; give fewer")
    return Target(name=f"{kind}:{rest}", chip=CHIPS[kind], shape=shape, slices=slices)
