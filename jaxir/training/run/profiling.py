"""How well a run uses its chips: beside its MFU what a plan says, and a trace of steps, which XProf opens."""

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
    """Returns how long the products of a step take at the chips' peak, none computed twice.

    Divided by the seconds that a step takes this is the MFU, model FLOPs utilisation (Chowdhery et al. 2022,
    appendix B). None where the chips are not known.
    """
    chip = chips.of_kind(partitioner.mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    loss_of = make_loss(plan, objective)
    # What is inside a kernel cannot be differentiated.
    with dataclasses.replace(partitioner, fused_attention=False)():
        flops = work.differentiated(
            lambda trained, state, batch: loss_of(trained, state, batch, jax.random.key(0)),
            plan.trained(state.params, state.auxiliary),
            state,
            batch,
        )
    return flops / (chip.flops * partitioner.mesh.size)


def planned(compiled: Any, partitioner: Partitioner) -> dict[str, float]:
    """Returns what a plan says of a step, read from the program that runs: nothing is compiled for it.

    Its memory on each device, GiB, and on TPUs the seconds of a step at full speed: with all at once, as the
    compiler has scheduled it, and with one thing after another (docs/planning.md). Programs for other devices
    call libraries and do not say what these do.
    """
    try:
        return _planned(compiled, partitioner)
    except Exception as error:  # a program that cannot be read is not worth ending the run for
        print(f"warning: no plan beside the measured figures: {error!r:.200}", file=sys.stderr)
        return {}


def _planned(compiled: Any, partitioner: Partitioner) -> dict[str, float]:
    figures = {"planned/memory_gib": memory_of(compiled) / chips.GIB}
    target = targets.of_devices(list(partitioner.mesh.devices.flat))
    if target is None or target.chip.kind != "tpu":
        return figures
    costs = step_costs.of_program(hlo.parse(compiled.as_text()), target, partitioner.mesh)
    return figures | {
        "planned/all_at_once_seconds": costs.roofline.overlapped,
        "planned/as_scheduled_seconds": costs.overlap.seconds,
        "planned/one_after_another_seconds": costs.roofline.in_turn,
    }


def peak_memory(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Returns the most memory, GiB, that one of the devices has held so far; nothing where none counts it."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return {"peak_memory_gib": max(known) / chips.GIB} if known else {}


def steps_to_trace(told: str | None, steps: int) -> tuple[int, int] | None:
    """Returns the first and the last step of a range "10:13", which has both; None of None.

    Args:
      told: the range.
      steps: of the run.

    Raises:
      UserError: it is no range, or the run has no such steps.
    """
    if told is None:
        return None
    match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", told, re.ASCII)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= steps:
        raise UserError(
            f"profile_steps must be the first and the last of some of the {steps:,} steps, such as 10:13,"
            f" not {told!r:.40}"
        )
    return first, last


class Trace:
    """Traces steps of a run (`jax.profiler`) beside its scalars, where TensorBoard looks for profiles.

    Each machine writes what it saw, once the last of the steps is done.

    Args:
      run_dir: of the run.
      steps: the first and the last; None for none.
      start_step: those already done.
    """

    def __init__(self, run_dir: Path, steps: tuple[int, int] | None, *, start_step: int):
        self._first, self._last = steps or (0, 0)
        self._place = run_dir / BOARD
        self._closing, self._tracing = contextlib.ExitStack(), contextlib.ExitStack()
        self.begun_before = f"{self._first}:{self._last}" if start_step >= self._first > 0 else None

    def before(self, step: int) -> None:
        """Begins where `step` is the first."""
        if step == self._first:
            self._aside = self._closing.enter_context(temporary_directory())
            self._tracing.enter_context(jax.profiler.trace(self._aside))

    def after(self, step: int, result: Any) -> str | None:
        """Ends where `step`, which gives `result`, is the last; returns a sentence on what was written."""
        if step != self._last or self.begun_before:
            return None
        jax.block_until_ready(result)
        self._tracing.close()
        session = self._place / "plugins" / "profile" / f"steps_{self._first}_to_{self._last}"
        try:
            for found in self._aside.rglob("*.xplane.pb"):
                with atomic_file(session / found.name, "wb") as file:
                    file.write(found.read_bytes())
        except (UserError, OSError) as error:  # a trace is not worth ending the run for
            return f"warning: {error}"
        return f"steps {self._first} to {self._last} are traced: xprof {self._place}"

    def close(self) -> None:
        """Ends the trace of a run that stops within, of which nothing is kept."""
        self._tracing.close()
        self._closing.close()
