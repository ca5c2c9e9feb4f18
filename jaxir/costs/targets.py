"""Machines by name: a TPU slice or a number of GPUs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxir.core.errors import UserError, suggest
from jaxir.costs.chips import CHIPS, SLICES, Chip, of_kind

if TYPE_CHECKING:
    import jax


TPUS = [name for name, chip in CHIPS.items() if chip.kind == "tpu"]
GPUS = [name for name, chip in CHIPS.items() if chip.kind == "gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Accelerators of one kind."""

    name: str  # name as the user wrote it
    chip: Chip  # the kind of all accelerators
    shape: tuple[int, ...]  # a TPU slice's torus, in chips; the number of GPUs
    slices: int = 1  # TPU slices joined by the data-centre network, or GPU nodes

    @property
    def count(self) -> int:
        """Number of chips."""
        return math.prod(self.shape) * (self.slices if self.chip.kind == "tpu" else 1)

    def larger(self) -> list[Target]:
        """Returns larger targets of the same chip, smallest first."""
        if self.chip.kind == "gpu":
            counts = [self.count * k for k in (2, 4, 8, 16)]
            whole = [n for n in counts if n <= self.chip.node or n % self.chip.node == 0]
            return [parse(f"gpu:{n}x{self.chip.name}") for n in whole]
        found = [parse(f"{self.chip.name}:{shape}") for shape in SLICES[self.chip.name]]
        return [target for target in found if target.count > self.count]


def of_devices(devices: Sequence[jax.Device]) -> Target | None:
    """Returns the target that existing devices make up; None for an unknown chip."""
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


MOST_GPUS = 2048  # limit of XLA's CPU client, whose devices represent GPUs in a plan
MOST_SLICES = 4096  # maximum, because the TPU compiler allocates an object for each chip


def parse(text: str) -> Target:
    """Reads "v5p:4x4x4", "v5e:4x4*2" (two slices) or "gpu:8xh100"."""
    name = text.strip().lower()
    kind, _, rest = name.partition(":")
    if kind == "gpu":
        match = re.fullmatch(r"([1-9]\d*)x([a-z]\w*)", rest)
        if match is None or match[2] not in GPUS:
            raise UserError(
                f"--topology={text}: GPUs are written gpu:NUMBERxCHIP, with CHIP one of {', '.join(GPUS)}"
                f"{_meant(name) or (suggest(match[2], GPUS) if match else '')}"
            )
        chip, count = CHIPS[match[2]], int(match[1])
        if count > MOST_GPUS:
            raise UserError(f"--topology={text}: plans are for at most {MOST_GPUS:,} GPUs; give fewer")
        if count > chip.node and count % chip.node:
            raise UserError(f"--topology={text}: give a multiple of {chip.node}, a node's GPUs")
        return Target(name=f"gpu:{rest}", chip=chip, shape=(count,), slices=-(-count // chip.node))
    if kind not in TPUS:
        raise UserError(
            f"--topology={text}: no chip {kind!r}{_meant(name) or suggest(kind, [*TPUS, *GPUS])}; write"
            f" CHIP:SHAPE with {', '.join(TPUS)}, such as v5p:4x4x4, or gpu:8xh100"
        )
    match = re.fullmatch(r"(\d+(?:x\d+){1,2})(?:\*([1-9]\d*))?", rest)
    known = SLICES[kind]
    if match is None or match[1] not in known:
        raise UserError(
            f"--topology={text}: no such slice of {kind}{_meant(name)}; give one of {', '.join(known)}"
        )
    shape = tuple(int(part) for part in match[1].split("x"))
    slices = int(match[2] or 1)
    if slices > MOST_SLICES:
        raise UserError(f"--topology={text}: plans are for at most {MOST_SLICES:,} slices; give fewer")
    return Target(name=f"{kind}:{rest}", chip=CHIPS[kind], shape=shape, slices=slices)


def _meant(name: str) -> str:
    """Returns `; did you mean 'v5e:2x2'?` for other names of a machine, such as Google Cloud's, else "".

    v4-8 and v5p-8 have 8 cores, which are 4 chips; v5e-8 and v6e-8 have 8 chips.
    """
    plain = re.sub(r"^(cloud|tpu|gpu|nvidia)[-_: ]*", "", name).replace("v5litepod", "v5e")
    plain = re.sub(r"(?<=00)[-_ ]?80gb?\b", "", plain)  # drop the memory from names such as "A100 80GB"
    chips = "|".join(sorted(CHIPS, key=len, reverse=True))
    first = re.fullmatch(rf"({chips})(?:[-_:x* ]*(\d+(?:x\d+)*))?", plain)
    last = re.fullmatch(rf"(\d+)[-_:x* ]*({chips})", plain)
    if first is None and last is None:
        return ""
    chip, size = (first[1], first[2]) if first else (last[2], last[1])
    count = math.prod(map(int, (size or "1").split("x")))
    if chip in GPUS:
        return f"; did you mean 'gpu:{count}x{chip}'?" if "x" not in (size or "") and count else ""
    if size is None:
        return f"; did you mean '{chip}:{SLICES[chip][0]}'?"
    cores = 2 if CHIPS[chip].torus == 3 and "x" not in size else 1
    shapes = {math.prod(map(int, shape.split("x"))) * cores: shape for shape in SLICES[chip]}
    return f"; did you mean '{chip}:{shapes[count]}'?" if count in shapes else ""
