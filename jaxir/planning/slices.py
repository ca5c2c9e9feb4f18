"""`python -m jaxir.plan --search`: the fastest setting of each TPU slice, and the cheapest slice."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from jaxir.core.errors import UserError
from jaxir.core.values import Positive
from jaxir.costs import targets
from jaxir.costs.targets import Target
from jaxir.models.layers import POLICIES
from jaxir.planning import advice, devices, plan_report, run_plan, setting_search
from jaxir.planning import prices as prices_lib
from jaxir.planning.program import Planned, bytes_of, check_sizes, compiler_settings, make_step
from jaxir.planning.setting_search import Choice
from jaxir.planning.step_figures import Figures, measure
from jaxir.runtime.compile_cache import can_send
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.memory import HEADROOM


class Searched(NamedTuple):
    """Results of the search on one slice."""

    target: Target
    rows: Mapping[Choice, Figures | str]  # figures of each choice, or why it was not compiled
    best: Choice | None  # the fastest that fits; None if none does
    why: str = ""  # the reason that the slice was not searched; "" if it was searched

    @property
    def seconds(self) -> float:
        """Seconds of a step with the best choice."""
        return self.rows[self.best].scheduled


def run(
    texts: str, recipe: Recipe, *, prices: Sequence[str] | None = None, hours: Positive | None = None
) -> int:
    """Searches slices and prints the results; returns 0 if one is suitable, else 1.

    Must be the first use of JAX in its process. Prefers the cheapest slice if there are `prices`, else the
    fastest; `hours` limits the run.
    """
    found = [targets.parse(text) for text in texts.split(",")]
    if gpus := [target.name for target in found if target.chip.kind == "gpu"]:
        raise UserError(
            f"--search compiles, which is possible for TPUs only: replace {gpus[0]} by a TPU slice"
        )
    priced = prices_lib.read(prices, found)
    recipe = run_plan.settled(recipe)
    searched = [_search(target, recipe, hours) for target in found]
    chosen = choose(searched, recipe, priced, hours)
    if chosen is None:
        print(
            "no slice is fast enough" if any(one.best for one in searched) else "nothing fits into any slice"
        )
    else:
        print("\n".join(_settings(chosen, recipe, priced)))
    print()
    if len(found) > 1 or priced or hours:
        print("\n".join(comparison(searched, chosen, recipe, priced, hours)))
    print("\n".join(line for one in searched for line in _slice_lines(one, recipe)))
    if compiler_settings().quick:
        print(f"\nwarning: {plan_report.QUICK}")
    return 0 if chosen is not None else 1


def _search(target: Target, recipe: Recipe, hours: float | None) -> Searched:
    """Searches a slice and prints progress on standard error."""
    changes = advice.mesh_changes(recipe.mesh, target)
    mesh = dataclasses.replace(recipe.mesh, **changes)
    in_reach = devices.get(target)
    base = run_plan.prepare(dataclasses.replace(recipe, mesh=mesh), target, in_reach)
    try:
        base.recipe.check_batch(base.partitioner)
    except UserError as error:
        return Searched(target, {}, None, str(error))
    step = make_step(base)
    check_sizes(step)
    if hours is not None:
        least = step.useful_flops() / (target.count * target.chip.flops) * recipe.steps / prices_lib.HOUR
        if least > hours:
            return Searched(target, {}, None, f"its matrix products already take {least:.3g} hours")
    progress = _Progress(target)
    rows = setting_search.search(
        _start(base),
        _levels(base, in_reach),
        lambda choice: _refused(base, choice),
        lambda choice: _measured(base, choice, target, in_reach, progress),
        progress.report,
    )
    return Searched(target, rows, setting_search.best(rows))


class _Progress:
    """Reports on standard error what was compiled, and the estimated remaining time."""

    def __init__(self, target: Target):
        self.target, self.compiling, self.cached = target, [], False

    def report(self, choice: Choice, figures: Figures, left: int) -> None:
        result = f"{plan_report.gib(figures.size)} GiB" + ("" if figures.fits else ", does not fit")
        if figures.timed:
            result += f", {plan_report.duration(figures.scheduled)} a step"
        self.compiling.append(figures.compiling)
        how = "cached" if self.cached else f"{figures.compiling:.0f} s"
        rest = left * sum(self.compiling) / len(self.compiling)
        then = f"; about {left} more, {plan_report.duration(rest)}" if left else ""
        print(f"{self.target.name} {choice}: {result} ({how}){then}", file=sys.stderr, flush=True)


def _start(base: Planned) -> Choice:
    shape = base.partitioner.mesh.shape
    return Choice(
        fsdp=shape["fsdp"],
        tensor=shape["tensor"],
        remat=True,
        chunks=base.chunks if isinstance(base.chunks, int) else 1,
        scan=base.config.backbone.scan_layers,
        sparse_cores=base.recipe.mesh.sparse_cores,
    )


def _levels(base: Planned, in_reach: Sequence[jax.Device]) -> setting_search.Levels:
    """Returns the values to try: divisors of the chips of a slice and of the rows of the batch."""
    shape = base.partitioner.mesh.shape
    chips = shape["data"] * shape["fsdp"] * shape["tensor"]
    parts = [n for n in range(1, chips + 1) if chips % n == 0]
    rows = base.recipe.batch_size // shape["slices"]
    cuts = hasattr(base.recipe.objective, "chunks")
    return {
        "fsdp": parts,
        "tensor": parts,
        "remat": [False, *POLICIES],
        "chunks": [n for n in range(1, rows + 1) if rows % n == 0] if cuts else [1],
        "scan": [True, False] if base.config.backbone.num_layers > 1 else [base.config.backbone.scan_layers],
        "sparse_cores": [False, True] if can_send(in_reach) else [base.recipe.mesh.sparse_cores],
    }


def _refused(base: Planned, choice: Choice) -> str:
    """Returns why a choice cannot be run; "" if it can."""
    shape, backbone = base.partitioner.mesh.shape, base.config.backbone
    chips = shape["data"] * shape["fsdp"] * shape["tensor"]
    rows = base.recipe.batch_size // shape["slices"]
    for what, size, parts in (
        ("chips", chips, choice.fsdp * choice.tensor),
        ("embed_dim", backbone.embed_dim, choice.fsdp),
        ("num_heads", getattr(backbone, "num_heads", 0), choice.tensor),
        ("mlp_dim", getattr(backbone, "mlp_dim", 0), choice.tensor),
        ("rows of the batch", rows, chips // choice.tensor * choice.chunks),
    ):
        if size % parts:
            return f"{what}: {size} is not a multiple of {parts}"
    if choice.remat == "weights" and choice.fsdp == 1:
        return "remat=weights needs fsdp above 1"
    return ""


def _measured(
    base: Planned, choice: Choice, target: Target, found: Sequence[jax.Device], progress: _Progress
) -> Figures | str:
    """Returns a choice's figures, or why it cannot be run or need not be compiled."""
    given = {"fsdp": choice.fsdp, "tensor": choice.tensor, "sparse_cores": choice.sparse_cores}
    mesh = dataclasses.replace(base.recipe.mesh, data=-1, **given)
    recipe = dataclasses.replace(base.recipe, mesh=mesh)
    if hasattr(recipe.objective, "chunks"):
        objective = dataclasses.replace(recipe.objective, chunks=choice.chunks)
        recipe = dataclasses.replace(recipe, objective=objective)
    partitioner = advice.build_mesh(mesh, found, target)
    try:
        recipe.check_batch(partitioner)
    except UserError as error:  # the batch may not suit the mesh
        return str(error)
    planned = dataclasses.replace(base, recipe=recipe, partitioner=partitioner)
    step = make_step(planned.with_remat(choice.remat, scan_layers=choice.scan))
    held = bytes_of(step.state) + bytes_of(step.batch)
    if held > HEADROOM * target.chip.memory:
        return f"parameters and optimizer state already take {plan_report.gib(held)} GiB"
    try:
        figures, progress.cached = measure(step, target)
    except UserError as error:  # raised by the compiler
        return str(error)
    return figures


def choose(
    searched: Sequence[Searched], recipe: Recipe, prices: Mapping[str, float] | None, hours: float | None
) -> Searched | None:
    """Returns the cheapest slice that is fast enough (without `prices` the fastest); None if none is."""
    able = [s for s in searched if s.best is not None]
    if hours is not None:
        able = [s for s in able if _hours(s, recipe) <= hours]
    if prices is None:
        return min(able, key=lambda s: s.seconds, default=None)
    return min(able, key=lambda s: (_cost(s, recipe, prices), s.seconds), default=None)


def _hours(searched: Searched, recipe: Recipe) -> float:
    return searched.seconds * recipe.steps / prices_lib.HOUR


def _cost(searched: Searched, recipe: Recipe, prices: Mapping[str, float]) -> float:
    return prices_lib.cost(searched.seconds * recipe.steps, searched.target, prices)


def _slice_lines(searched: Searched, recipe: Recipe) -> Iterator[str]:
    target = searched.target
    yield f"search for {target.name}: {target.count} {target.chip.name} chips; ms a step at full speed"
    if searched.why:
        yield f"  not searched: {searched.why}"
        yield ""
        return
    figures = {c: f for c, f in searched.rows.items() if isinstance(f, Figures)}
    ordered = sorted(figures, key=lambda c: (not figures[c].fits, figures[c].scheduled, figures[c].size))
    heads = ["fsdp", "tensor", "data", "remat", "chunks", "scan", "sparse cores", "GiB", "products"]
    heads += ["elementwise", "HBM", "interconnect", "waits", "at once", "scheduled", "in turn", ""]
    rows: list[Sequence[str]] = [heads]
    rows += [(*_name(c, target), *_cells(figures[c], c == searched.best)) for c in ordered]
    if not any(choice.sparse_cores for choice in searched.rows):
        rows = [(*row[:6], *row[7:]) for row in rows]
    yield from _aligned(rows)
    skipped = [(c, why) for c, why in searched.rows.items() if isinstance(why, str)]
    if skipped:
        yield "  not compiled"
    for choice, why in skipped:
        yield f"    {choice}: {why}"
    if searched.best is None:
        yield f"  nothing fits into {HEADROOM:.0%} of {plan_report.gib(target.chip.memory)} GiB"
    yield ""


def _aligned(rows: Sequence[Sequence[str]], *, notes: bool = False) -> Iterator[str]:
    """Yields the lines of a right-aligned table; with `notes` its last column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if notes:
        widths[-1] = 0
    for row in rows:
        cells = (cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _name(choice: Choice, target: Target) -> tuple[str, ...]:
    fsdp, tensor, *rest = choice.words
    return fsdp, tensor, str(target.count // target.slices // (choice.fsdp * choice.tensor)), *rest


def _cells(figures: Figures, best: bool) -> tuple[str, ...]:
    gib = plan_report.gib(figures.size)
    note = "fastest" if best else "" if figures.fits else "does not fit"
    if not figures.timed:
        return gib, *[""] * 8, note
    names = ("matrix products", "elementwise (approx.)", "HBM", "interconnect")
    seconds = [figures.parts.get(name, 0.0) for name in names]
    seconds += [figures.waits, figures.at_once, figures.scheduled, figures.in_turn]
    return gib, *(f"{s * 1e3:.3g}" if s < 1 else f"{s * 1e3:,.0f}" for s in seconds), note


def comparison(
    searched: Sequence[Searched],
    chosen: Searched | None,
    recipe: Recipe,
    prices: Mapping[str, float] | None,
    hours: float | None,
) -> Iterator[str]:
    """Yields the lines of a table that compares slices."""
    yield f"slices, for {recipe.steps:,} steps as scheduled, at full speed"
    rows = [["slice", "chips", "step", "run", *(["cost"] if prices else []), ""]]
    for s in searched:
        row = [s.target.name, str(s.target.count)]
        if s.best is None:
            row += [""] * (3 if prices else 2) + [s.why or "nothing fits"]
        else:
            row += [plan_report.duration(s.seconds), plan_report.duration(s.seconds * recipe.steps)]
            row += [f"{_cost(s, recipe, prices):,.2f}"] if prices else []
            late = hours is not None and _hours(s, recipe) > hours
            row += ["too slow" if late else ("cheapest" if prices else "fastest") if s is chosen else ""]
        rows.append(row)
    yield from _aligned(rows, notes=True)
    if chosen is None:
        yield "  none is " + ("fast enough" if any(s.best for s in searched) else "large enough")
    yield ""


def _settings(searched: Searched, recipe: Recipe, prices: Mapping[str, float] | None) -> Iterator[str]:
    """Yields the verdict and the lines of a gin file that set the best choice."""
    target, choice = searched.target, searched.best
    step, whole = (plan_report.duration(searched.seconds * count) for count in (1, recipe.steps))
    costs = "" if prices is None else f", costs {_cost(searched, recipe, prices):,.2f}"
    yield (
        f"{target.name}: {recipe.steps:,} steps in {whole}{costs} ({step} a step as scheduled). Put these"
        " lines below a gin file's includes:"
    )
    yield ""
    remat = f'"{choice.remat}"' if isinstance(choice.remat, str) else choice.remat
    lines = {
        advice.MACROS["slices"]: target.slices,
        advice.MACROS["data"]: -1,
        advice.MACROS["fsdp"]: choice.fsdp,
        advice.MACROS["tensor"]: choice.tensor,
        "REMAT": remat,
        "SCAN": choice.scan,
    }
    if hasattr(recipe.objective, "chunks"):
        lines["CHUNKS"] = choice.chunks
    if choice.sparse_cores:
        lines["SPARSE_CORES"] = "True  # no TPU has run it yet: compare step_seconds without it"
    yield from (f"{name} = {value}" for name, value in lines.items())
