"""How well a run uses its chips: MFU, figures of the compiled program, and traces of steps for XProf."""

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
    # Operations inside a kernel cannot be counted.
    with dataclasses.replace(partitioner, fused_attention=False)():
        flops = work.differentiated(
            lambda trained, state, batch: loss_of(trained, state, batch, jax.random.key(0)),
            plan.trained(state.params, state.auxiliary),
            state,
            batch,
        )
    return flops / (chip.flops * partitioner.mesh.size)


def planned(compiled: Any, partitioner: Partitioner) -> dict[str, float]:
    """Returns what a plan says about a step, read from the compiled program.

    These are its memory on each device in GiB and, on TPUs, the seconds of a step at full speed: all at once,
    as the compiler scheduled it, and one operation after another (docs/planning.md). Programs for other
    devices call libraries.
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
    except Exception as error:  # a program that cannot be read does not end the run
        print(
            f"warning: the log has no planned/ figures, reading the program failed: {error!r:.200}",
            file=sys.stderr,
        )
        return {}


def peak_memory(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Returns the most memory, in GiB, that one device has held so far; empty if no device counts it."""
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
            f"profile_steps must be the first and the last step to trace, of the {steps:,} steps, such as"
            f" 10:13, not {given!r:.40}"
        )
    return first, last


class Trace:
    """A trace of some steps of a run (`jax.profiler`), written beside its TensorBoard scalars.

    Every machine writes its own events once the last of the steps is done. `steps` is the first and the last.
    """

    def __init__(self, run_dir: Path, steps: tuple[int, int] | None, *, start_step: int):
        self._first, self._last = steps or (0, 0)
        self._place = run_dir / BOARD
        self._closing, self._tracing = contextlib.ExitStack(), contextlib.ExitStack()
        self.begun_before = f"{self._first}:{self._last}" if start_step >= self._first > 0 else None

    def before(self, step: int) -> None:
        """Begins the trace if `step` is the first."""
        if step == self._first:
            self._temporary = self._closing.enter_context(temporary_directory())
            self._tracing.enter_context(jax.profiler.trace(self._temporary))

    def after(self, step: int, result: Any) -> str | None:
        """Ends the trace if `step`, whose result is given, is the last; returns a sentence on its files."""
        if step != self._last or self.begun_before:
            return None
        jax.block_until_ready(result)
        self._tracing.close()
        session = self._place / "plugins" / "profile" / f"steps_{self._first}_to_{self._last}"
        try:
            for found in self._temporary.rglob("*.xplane.pb"):
                with atomic_file(session / found.name, "wb") as file:
                    file.write(found.read_bytes())
        except (UserError, OSError) as error:  # a trace that cannot be written does not end the run
            return f"warning: {error}"
        return f"steps {self._first} to {self._last} are traced; open them with: xprof {self._place}"

    def close(self) -> None:
        """Discards the trace of a run that stops within its steps."""
        self._tracing.close()
        self._closing.close()
