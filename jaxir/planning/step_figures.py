"""Memory and times of a compiled step, cached because compiling takes minutes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxir.core.errors import UserError
from jaxir.core.installation import cache_directory
from jaxir.costs import chips, collectives, hlo, overlap, roofline, step_costs, work
from jaxir.costs.targets import Target
from jaxir.planning import devices
from jaxir.planning.program import Step, compile_step, compiler_settings, lower
from jaxir.runtime import compile_cache
from jaxir.storage.files import atomic_file
from jaxir.storage.json_files import made, read_json
from jaxir.training.step.memory import HEADROOM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Memory and times of a step on each chip of a slice."""

    size: int  # bytes that the step needs
    held: int  # the part of `size` for state and batch
    limit: int  # bytes of memory of a chip
    compiling: float  # compile time in seconds
    # Seconds of each kind of work at full speed; empty if the compiler gave no program.
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    at_once: float = 0.0  # seconds if everything overlaps
    scheduled: float = 0.0  # seconds in the order in which the compiler scheduled the program
    in_turn: float = 0.0  # seconds if nothing overlaps
    waits: float = 0.0  # seconds of the interconnect during which nothing else runs

    @property
    def allowed(self) -> int:
        """Bytes that the step may need: the same share of `limit` as in training (`memory.fit_memory`)."""
        return int(self.limit * HEADROOM)

    @property
    def fits(self) -> bool:
        return self.size <= self.allowed

    @property
    def at_least(self) -> int:
        """Bytes that remain however far parameters, gradients and optimizer state are split."""
        return max(self.size - 2 * self.held, 0)

    @property
    def timed(self) -> bool:
        """Whether the times of the step are known."""
        return bool(self.parts)


def measure(step: Step, target: Target) -> tuple[Figures, bool]:
    """Compiles a step for a TPU slice, or reads its cached figures; also returns whether they were cached."""
    lowered = lower(step)
    options = compile_cache.compiler_options(step.partitioner)
    path = cache_directory() / "plans" / f"{_key(lowered, target, options)}.json"
    try:
        return made(Figures, read_json(path, dict), path), True
    except UserError:  # the cached file is missing or damaged
        pass
    start = time.monotonic()
    compiled = compile_step(step, lowered)
    found = Figures(
        size=compiled.size,
        held=compiled.held,
        limit=compiled.limit_on(target),
        compiling=time.monotonic() - start,
    )
    if compiled.program is not None:
        costs = step_costs.of_program(compiled.program, target, step.partitioner.mesh)
        times, followed = costs.roofline, costs.overlap
        found = dataclasses.replace(
            found,
            parts=times.parts,
            at_once=times.overlapped,
            scheduled=followed.seconds,
            in_turn=times.in_turn,
            waits=max(times.interconnect - followed.hidden_seconds, 0.0),
        )
    with atomic_file(path) as file:
        json.dump(dataclasses.asdict(found), file, indent=2)
    return found, False


def _key(lowered: jax.stages.Lowered, target: Target, options: Mapping[str, Any]) -> str:
    """Returns a cache key of all that determines the figures: program, compiler, and code that reads it."""
    library = devices.find_libtpu()
    facts = (
        lowered.as_text(),
        target.name,
        compiler_settings(),
        options,
        jax.__version__,
        library.stat().st_size,
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        _readers(),
    )
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:32]


@functools.cache
def _readers() -> str:
    """Returns a hash of the code that reads compiled programs."""
    sources = [module.__file__ for module in (chips, hlo, work, collectives, overlap, roofline, step_costs)]
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in (*sources, __file__))).hexdigest()
