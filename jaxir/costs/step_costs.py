"""All that a compiled program says of a step on given chips."""

from __future__ import annotations

from typing import NamedTuple

from jax.sharding import Mesh

from jaxir.costs import collectives, overlap, roofline, work
from jaxir.costs.collectives import Collective
from jaxir.costs.hlo import Program
from jaxir.costs.overlap import Overlap
from jaxir.costs.roofline import Roofline
from jaxir.costs.targets import Target
from jaxir.costs.work import Work


class StepCosts(NamedTuple):
    """What a step does and how long it takes at full speed.

    Attributes:
      work: of each chip.
      collectives: largest traffic first.
      roofline: seconds of each kind of work.
      overlap: the step in the order of its program; None for GPUs, whose programs are no schedules.
    """

    work: Work
    collectives: list[Collective]
    roofline: Roofline
    overlap: Overlap | None


def of_program(program: Program | None, target: Target, mesh: Mesh, counted: Work | None = None) -> StepCosts:
    """Reads the costs of a step.

    Args:
      program: the compiled step; None for a step on one chip that no compiler has seen, with `counted`.
      target: the chips.
      mesh: what it was compiled for; partition i is the i-th device of it.
      counted: the work, where the program does not tell it.
    """
    in_order = list(mesh.devices.flat)
    sent = [] if program is None else collectives.read(program, mesh)
    done = work.compiled(program) if counted is None else counted
    is_schedule = program is not None and target.chip.kind == "tpu"
    followed = overlap.read(program, target, mesh, in_order) if is_schedule else None
    return StepCosts(done, sent, roofline.estimate(done, sent, target, in_order), followed)
