"""Measures how well a run uses its chips: MFU, costs of the compiled program, and traces for XProf."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxir.core.errors import UserError
from jaxir.costs import chips, hlo, step_costs, targets, work
from jaxir.objectives.objective import Objective
from jaxir.runtime.partitioning import Partitioner
from jaxir.storage.files import atomic_file
from jaxir.storage.temporary_outputs import temporary_directory
from jaxir.training.run.logs import BOARD
from jaxir.training.step.memory import memory_of
from jaxir.training.step.train_state import Batch, Plan, TrainState, make_loss


def ideal_seconds(
    plan: Plan, objective: Objective, state: TrainState, batch: Batch, partitioner: Partitioner
) -> float | None:
    """Returns the seconds that a step's matrix products take at the chips' peak; None for unknown chips.

    Divided by the measured seconds of a step, this is the MFU, model FLOPs utilisation (Chowdhery et al.
    2022, appendix B).
    """
    chip = chips.of_kind(partitioner.mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    loss_of = make_loss(plan, objective)
    # Count attention without its fused kernel, since operations inside a kernel cannot be counted.
    with dataclasses.replace(partitioner, fused_attention=False)():
        flops = work.differentiated(
            lambda trained, state, batch: loss_of(trained, state, batch, jax.random.key(0)),
            plan.trained(state.params, state.auxiliary),
            state,
            batch,
        )
    return flops / (chip.flops * partitioner.mesh.size)


def planned(compiled: Any, partitioner: Partitioner) -> dict[str, float]:
    """Returns the figures that `jaxir.plan` estimates for a step, read from the compiled program.

    They are the step's memory per device in GiB and, only on TPUs, its seconds at full speed in three cases:
    operations overlap completely, as the compiler scheduled them, or not at all (docs/planning.md). On other
    devices, programs call libraries, whose work cannot be read.
    """
    try:
        figures = {"planned/memory_gib": memory_of(compiled) / chips.GIB}
        target = targets.of_devices(list(partitioner.mesh.devices.flat))
        if target is not None and target.chip.kind == "tpu":
            costs = step_costs.of_program(hlo.parse(compiled.as_text()), target, partitioner.mesh)
            figures["planned/all_at_once_seconds"] = costs.roofline.overlapped
            figures["planned/as_scheduled_seconds"] = costs.overlap.seconds
            figures["planned/one_after_another_seconds"] = costs.roofline.in_turn
        return figures
    except Exception as error:  # the run continues without these figures
        print(
            f"warning: the log has no planned/ figures: the step's program cannot be read: {error!r:.200}",
            file=sys.stderr,
        )
        return {}


def peak_memory(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Returns the peak memory of any of the devices so far, in GiB; empty if no device reports it."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return {"peak_memory_gib": max(known) / chips.GIB} if known else {}


def steps_to_trace(given: str | None, steps: int) -> tuple[int, int] | None:
    """Returns the first and last step of a range such as "10:13"; refuses a range outside the run's steps."""
    if given is None:
        return None
    match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", given, re.ASCII)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= steps:
        raise UserError(
            f"profile_steps must be the first and the last step to trace, of the run's {steps:,} steps, such"
            f" as 10:13, not {given!r:.40}"
        )
    return first, last


class Trace:
    """A trace of some steps of a run (`jax.profiler`), written beside its TensorBoard scalars.

    Every machine writes its own events after the last traced step. `steps` is the first and last step to
    trace; None traces nothing.
    """

    def __init__(self, run_dir: Path, steps: tuple[int, int] | None, *, start_step: int):
        self._first, self._last = steps or (0, 0)
        self._place = run_dir / BOARD
        self._closing, self._tracing = contextlib.ExitStack(), contextlib.ExitStack()
        self.begun_before = f"{self._first}:{self._last}" if start_step >= self._first > 0 else None

    def before(self, step: int) -> None:
        """Begins the trace if `step` is the first step to trace."""
        if step == self._first:
            self._temporary = self._closing.enter_context(temporary_directory())
            self._tracing.enter_context(jax.profiler.trace(self._temporary))

    def after(self, step: int, result: Any) -> str | None:
        """Ends the trace if `step` is the last to trace, once `result` is ready; returns a note or None."""
        if step != self._last or self.begun_before:
            return None
        jax.block_until_ready(result)
        self._tracing.close()
        session = self._place / "plugins" / "profile" / f"steps_{self._first}_to_{self._last}"
        try:
            for found in self._temporary.rglob("*.xplane.pb"):
                with atomic_file(session / found.name, "wb") as file:
                    file.write(found.read_bytes())
        except (UserError, OSError) as error:  # the run continues without a trace
            return f"warning: {error}"
        return f"steps {self._first} to {self._last} are traced; open them with: xprof {self._place}"

    def close(self) -> None:
        """Discards an unfinished trace, if the run stops before the last step to trace."""
        self._tracing.close()
        self._closing.close()
