"""Renders a plan as text."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxir.costs.chips import GIB
from jaxir.costs.collectives import Collective
from jaxir.costs.overlap import Overlap
from jaxir.costs.step_costs import StepCosts
from jaxir.costs.targets import Target
from jaxir.costs.work import Work
from jaxir.planning.prices import cost
from jaxir.planning.program import CompilerSettings

# Warning of a plan compiled under quick settings. Its figures are of recipes with two encoders
# (docs/planning.md).
QUICK = (
    "compiled under quick settings: for models with two encoders memory is 7 to 15 % smaller than in"
    " training, HBM traffic and its time about twice as large; products and collectives are exact. Plan"
    " without these settings before you rely on a fit"
)


class Memory(NamedTuple):
    """Bytes on each chip by kind."""

    parameters: int  # parameters of the model, float32
    optimizer: int  # state of the optimizer
    batch: int  # token ids and keys
    gradients: int  # computed from shapes; part of `temporaries`
    activations: int  # bytes kept for the backward pass, computed from shapes; part of `temporaries`
    temporaries: int  # all except state, batch and code: gradients, activations, gathered weights, work space
    code: int  # the program, and padding of the arrays

    @property
    def state(self) -> int:
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.batch + self.temporaries + self.code


class Plan(NamedTuple):
    """Everything known about a run before it starts."""

    target: Target
    compiled: bool  # whether the program was compiled for these chips; otherwise the numbers are estimates
    mesh: dict[str, int]  # sizes of the mesh's axes
    model: str  # summary of the model
    num_parameters: int
    batch: str  # summary of the batch
    memory: Memory  # on each chip
    limit: int  # bytes of memory on each chip, from the compiler or the data sheet
    short_by: int  # missing bytes on each chip; 0 if the step fits
    steps: int
    useful_flops: float  # operations of a step over all chips, without recomputation
    costs: StepCosts | None  # costs of a step; None if the compiler gave no program
    warnings: Sequence[str]  # defects of the program, as sentences
    advice: Sequence[str]  # changes that would fit, each with its command
    seconds: float  # compile time in seconds
    settings: CompilerSettings = CompilerSettings()

    @property
    def quick(self) -> bool:
        """Whether the program was compiled with less optimisation."""
        return self.compiled and self.settings.quick

    @property
    def fits(self) -> bool:
        return self.short_by == 0

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """Least and most seconds of a step at full speed; None without a program."""
        if self.costs is None:
            return None
        least, scheduled = self.costs.roofline, self.costs.overlap
        return (least.overlapped, least.in_turn) if scheduled is None else (scheduled.seconds,) * 2


def render(plan: Plan, prices: Mapping[str, float] | None = None) -> str:
    """Returns the plan as text: the verdict, then details. `prices` are per chip-hour, by chip name."""
    return "\n".join([*_verdict(plan, prices), "", *_lines(plan, prices)])


def _verdict(plan: Plan, prices: Mapping[str, float] | None) -> Iterator[str]:
    quick = ", by quick settings" if plan.quick else ""
    if plan.fits:
        share = f"{plan.memory.total / plan.limit:.0%}"
        yield f"fits{quick}: {gib(plan.memory.total)} of {gib(plan.limit)} GiB on each chip ({share})"
    else:
        yield f"does not fit{quick}: {gib(plan.short_by)} GiB are missing on each chip"
    if not plan.fits:
        yield "try one of these:" if plan.advice else "no known setting, slice or chip is large enough"
        yield from (f"  {line}" for line in plan.advice)
    if plan.step_seconds is not None:
        run = [seconds * plan.steps for seconds in plan.step_seconds]
        costs = "" if prices is None else f", costs {span(*(money(s, plan.target, prices) for s in run))}"
        yield f"{plan.steps:,} steps at full speed: {span(*map(duration, run))}{costs}"
    elif prices is not None:
        yield "no time and no cost, because the step does not fit"


def span(least: str, most: str) -> str:
    """Returns "LEAST to MOST", or only LEAST if both are equal."""
    return least if least == most else f"{least} to {most}"


def money(seconds: float, target: Target, prices: Mapping[str, float]) -> str:
    """Returns the cost of `seconds` on all chips of a target, in the unit of the prices."""
    return f"{cost(seconds, target, prices):,.2f}"


def _lines(plan: Plan, prices: Mapping[str, float] | None) -> Iterator[str]:
    chip, target = plan.target.chip, plan.target
    groups = f" in {target.slices} {'slices' if chip.kind == 'tpu' else 'nodes'}" if target.slices > 1 else ""
    yield f"plan for {target.name}: {target.count} {chip.name} chips{groups}"
    axes = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    yield f"  model     {plan.model}"
    yield f"  batch     {plan.batch}"
    yield f"  mesh      {axes}"
    if plan.compiled:
        yield f"  source    the training step, compiled by the TPU's compiler in {plan.seconds:.0f} s"
        if plan.settings.given:
            quick = "quick settings" if plan.quick else "your settings"
            yield f"            under {quick}: {' '.join(plan.settings.given)}"
    else:
        yield "  source    no GPU compiler: state and products are exact, collectives are those of the"
        yield "            partitioned program, other memory and traffic are estimated"
    yield ""
    yield from _memory(plan)
    if plan.costs is not None:
        yield ""
        yield from _work(plan, plan.costs.work)
        yield ""
        yield from _collectives(plan.costs.collectives, plan.costs.overlap)
        yield ""
        yield from _time(plan, plan.costs, prices)
    for warning in (QUICK, *plan.warnings) if plan.quick else plan.warnings:
        yield ""
        yield f"warning: {warning}"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    about = "" if plan.compiled else " (estimate)"
    yield f"memory on each chip, GiB (of {gib(plan.limit)})"
    rest = max(memory.temporaries - memory.gradients - memory.activations, 0)
    rows = [
        ("parameters, float32", memory.parameters, ""),
        ("optimizer state", memory.optimizer, ""),
        ("batch", memory.batch, ""),
        (f"temporaries{about}", memory.temporaries, ""),
        ("  gradients", memory.gradients, "from shapes"),
        ("  activations for the backward pass", memory.activations, "from shapes, at most"),
        ("  gathered weights, work space", rest, "the rest"),
        ("program, padding", memory.code, ""),
        ("total", memory.total, ""),
    ]
    for name, size, note in rows:
        yield f"  {name:<38}{gib(size):>10}  {note}".rstrip()


def _work(plan: Plan, work: Work) -> Iterator[str]:
    yield "work in a step"
    count = plan.target.count
    yield f"  products, all chips       {si(plan.useful_flops)}FLOP: a forward and a backward pass"
    useful = plan.useful_flops / count
    yield f"  products, each chip       {si(work.flops)}FLOP run, {si(useful)}FLOP of them useful"
    if work.vector:
        yield f"  elementwise, each chip    {si(work.vector)}operations"
    if work.bytes:
        about = "" if plan.compiled else " (estimate)"
        yield f"  HBM traffic, each chip    {si(work.bytes)}B{about}"


def _collectives(found: Sequence[Collective], overlap: Overlap | None) -> Iterator[str]:
    yield "collectives in a step, each chip"
    if not found:
        yield "  none"
        return
    heads = ["count", "arrays", "sent", *(["hidden", "waits"] if overlap else [])]
    yield f"  {'kind':<20}{'over':<20}{heads[0]:>7}{''.join(f'{head:>12}' for head in heads[1:])}"
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
    for c in found:
        entry = sums[c.kind, c.axes]
        entry[0] += c.count
        entry[1] += c.count * c.bytes
        entry[2] += c.traffic
    for (kind, axes), (count, size, sent) in sorted(sums.items(), key=lambda item: -item[1][2]):
        sizes = [size, sent]
        if overlap:
            hidden = overlap.hidden_bytes.get((kind, axes), 0.0)
            sizes += [hidden, sent - hidden]
        yield f"  {kind:<20}{' x '.join(axes):<20}{count:>7}{''.join(f'{si(n)}B'.rjust(12) for n in sizes)}"
    yield "  largest:"
    for c in found[:6]:
        times = f"{c.count} x " if c.count > 1 else ""
        over = " x ".join(c.axes)
        yield f"    {si(c.traffic) + 'B':>9}  {times}{c.kind} {_short(c.types, 34)} over {over}"
        if c.source:
            yield f"               {_short(c.source, 90)}"


def _time(plan: Plan, costs: StepCosts, prices: Mapping[str, float] | None) -> Iterator[str]:
    least, scheduled = costs.roofline, costs.overlap
    yield "time at full speed (roofline; real runs are slower)"
    hidden = ""
    if scheduled is not None and least.interconnect:
        waits = least.interconnect - scheduled.hidden_seconds
        hidden = f": {duration(scheduled.hidden_seconds)} behind other work, {duration(waits)} waited for"
    for name, seconds in least.parts.items():
        yield f"  {name:<22}{duration(seconds):>12} a step{hidden if name == 'interconnect' else ''}"
    peak = plan.target.count * plan.target.chip.flops
    times = {"all at once": least.overlapped}
    if scheduled is not None:
        times["as scheduled"] = scheduled.seconds
    times["one after another"] = least.in_turn
    for name, seconds in times.items():
        share, run = plan.useful_flops / (peak * seconds), seconds * plan.steps
        price = "" if prices is None else f", costs {money(run, plan.target, prices)}"
        yield (
            f"  {name:<22}{duration(seconds):>12} a step, {share:.0%} MFU;"
            f" {plan.steps:,} steps: {duration(run)}{price}"
        )
    yield f"  bound by {least.bound}"


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def si(number: float) -> str:
    """Returns a number with a unit prefix, such as "1.5 G"."""
    if number <= 0:
        return "0 "
    number = float(f"{number:.3g}")  # rounds 999.9 k to 1 M
    power = min(int(math.log10(number) / 3), 6) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}"


def duration(seconds: float) -> str:
    """Returns a time in a suitable unit."""
    if seconds < 120:
        seconds = float(f"{seconds:.3g}")
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
