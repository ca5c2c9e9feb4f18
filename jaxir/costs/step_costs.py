"""All costs of a compiled step on given chips."""

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
    """Work and time of a step at full speed."""

    work: Work  # work of each chip
    collectives: list[Collective]  # largest traffic first
    roofline: Roofline  # seconds of each kind of work
    # Time of a step as the compiler scheduled it; None for GPUs, whose programs have no schedule.
    overlap: Overlap | None


def of_program(program: Program | None, target: Target, mesh: Mesh, counted: Work | None = None) -> StepCosts:
    """Reads the costs of a step; partition i of its program is the i-th device of `mesh`.

    `counted` replaces the work read from the program; `program` may be None on a single chip.
    """
    in_order = list(mesh.devices.flat)
    sent = [] if program is None else collectives.read(program, mesh)
    done = work.compiled(program) if counted is None else counted
    is_schedule = program is not None and target.chip.kind == "tpu"
    followed = overlap.read(program, target, mesh, in_order) if is_schedule else None
    return StepCosts(done, sent, roofline.estimate(done, sent, target, in_order), followed)
