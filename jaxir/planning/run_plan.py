"""`python -m jaxir.plan`: memory, time and cost of a run before it starts."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxir.core.errors import UserError
from jaxir.core.features import Tokens
from jaxir.costs import step_costs, targets, work
from jaxir.costs.collectives import Collective
from jaxir.costs.step_costs import StepCosts
from jaxir.costs.targets import Target
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.layers import Remat
from jaxir.models.multi_vector import MultiVectorConfig
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.planning import advice, architecture, arithmetic, devices
from jaxir.planning.plan_report import Memory, Plan, gib, render
from jaxir.planning.prices import read as read_prices
from jaxir.planning.program import (
    Compiled,
    Planned,
    Step,
    bytes_of,
    check_sizes,
    compile_step,
    compiler_settings,
    make_step,
)
from jaxir.planning.typed import OF_RECIPES, Command
from jaxir.runtime.compile_cache import keep_no_more_programs
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.memory import fit_memory


def run(
    text: str, recipe: Recipe, *, prices: Sequence[str] | None = None, command: Command = OF_RECIPES
) -> int:
    """Prints the plan of a run; returns 0 if it fits, else 1.

    Reads neither data nor weights. Must be the first use of JAX in its process. Advice is
    printed as `command` with other flags.
    """
    if "," in text:
        raise UserError(f"--topology={text}: a plan is for one machine; add --search to compare several")
    target = targets.parse(text)
    priced = read_prices(prices, [target])
    planned = prepare(recipe, target, devices.get(target))
    planned.recipe.check_batch(planned.partitioner)
    plan = make(target, planned, command)
    print(render(plan, priced))
    return 0 if plan.fits else 1


def settled(recipe: Recipe) -> Recipe:
    """Returns a recipe with its defaults filled in; refuses a recipe without a number of steps."""
    if recipe.steps is None:
        raise UserError(
            f"a plan reads no data, so it cannot count the steps of {recipe.epochs} epochs: give --steps"
        )
    return recipe.settled()


def prepare(recipe: Recipe, target: Target, found: Sequence[jax.Device]) -> Planned:
    """Returns what to plan for a recipe on the devices of a target."""
    recipe = settled(recipe)
    config, settings = architecture.describe(recipe.model)
    # No later process can use these programs, and XLA does not dump a program that it reuses.
    keep_no_more_programs()
    partitioner = advice.build_mesh(recipe.mesh, found, target)
    return Planned(recipe=recipe, config=config, settings=settings, partitioner=partitioner)


class _Tried(NamedTuple):
    """A step, the bytes of its activations, its compiled program, and its costs if it compiled."""

    step: Step
    activations: int
    compiled: Compiled
    costs: StepCosts | None


def make(target: Target, planned: Planned, command: Command = OF_RECIPES) -> Plan:
    """Makes the plan of a run on `target`, whose chips the partitioner arranges."""
    partitioner = planned.partitioner
    start = time.monotonic()
    if "auto" in (planned.remat, planned.chunks):
        remat, objective, tried, _ = fit_memory(
            planned.remat,
            planned.recipe.objective,
            lambda remat, chosen: _try(target, planned.with_remat(remat).with_chunks(chosen)),
            rows=planned.recipe.batch_size // partitioner.batch_divisor(),
            limit=int(target.chip.memory),
            gathers=partitioner.mesh.shape["fsdp"] > 1,
            kernels=partitioner.on_tpu,
            scanned=planned.config.backbone.scan_layers,
            size_of=lambda tried: tried.compiled.size,
            seconds_of=lambda tried: (
                tried.costs.overlap.seconds if tried.costs and tried.costs.overlap else None
            ),
        )
        planned = planned.with_remat(remat).with_chunks(objective)
    else:
        tried = _try(target, planned)
    seconds = time.monotonic() - start
    step, activations, compiled, costs = tried
    memory = Memory(
        parameters=bytes_of((step.state.params, step.state.auxiliary, step.state.statistics)),
        optimizer=bytes_of(step.state.opt_state),
        batch=bytes_of(step.batch),
        gradients=bytes_of(step.trained),
        activations=activations,
        temporaries=compiled.temporaries,
        code=compiled.code + compiled.padding,
    )
    limit = compiled.limit_on(target)
    short_by = compiled.short_by or max(memory.total - limit, 0)
    found = [] if costs is None else costs.collectives
    warnings = warn(found, planned.recipe.batch_size, planned.settings)
    warnings += warn_of_whole_gradients(found, step.state.params)
    if compiled.program is not None and (endless := compiled.program.endless):
        warnings.append(f"{len(endless)} loops of unknown length are counted once, so times are too short")
    return Plan(
        target=target,
        compiled=target.chip.kind == "tpu",
        mesh=dict(partitioner.mesh.shape),
        model=_describe(planned, step),
        num_parameters=step.num_parameters,
        batch=_describe_batch(planned),
        memory=memory,
        limit=limit,
        short_by=short_by,
        steps=planned.recipe.steps,
        useful_flops=step.useful_flops(),
        costs=costs,
        warnings=warnings,
        advice=_advise(planned, tried, memory, limit, target, command) if short_by else [],
        seconds=seconds,
        settings=compiler_settings(),
    )


def warn(found: Sequence[Collective], batch_size: int, settings: EncoderSettings) -> list[str]:
    """Returns a warning for each collective that moves all token-level activations, unsharded."""
    lengths = {settings.query_max_length, settings.passage_max_length}
    lines = []
    for c in found:
        # Skip collectives outside of the forward and backward pass: they belong to the optimizer, whose
        # arrays may have the same sizes.
        if c.source.startswith("jit(") and "jvp(" not in c.source:
            continue
        for array in c.arrays:
            shape = tuple(n for n in array.shape if n > 1)
            rows = (shape[0] == batch_size and shape[1] in lengths) if len(shape) > 2 else False
            tokens = len(shape) == 2 and shape[0] in {batch_size * n for n in lengths}
            if (rows or tokens) and array.dtype.startswith(("f", "bf")):
                what = f"{array.dtype}{list(array.shape)} ({array.bytes / 1e6:,.0f} MB)"
                over = " x ".join(c.axes)
                lines.append(
                    f"a {c.kind} over {over} puts activations of the whole batch, {what}, on every chip:"
                    f" {c.source}"
                )
                break
    return lines


def warn_of_whole_gradients(found: Sequence[Collective], params: Any) -> list[str]:
    """Warns if gradients are all-reduced over "fsdp"; a reduce-scatter sends half as much.

    libtpu 0.0.42 makes a reduce-scatter for up to 16 chips of a torus, and an all-reduce for 32 or 64.
    """
    shapes = {leaf.shape[-2:] for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1}
    whole = [
        c
        for c in found
        if c.kind == "all-reduce" and "fsdp" in c.axes and any(a.shape[-2:] in shapes for a in c.arrays)
    ]
    sent, total = sum(c.traffic for c in whole), sum(c.traffic for c in found)
    if not whole or sent < 0.25 * total:
        return []
    share = f"{sent / 1e9:.3g} of {total / 1e9:.3g} GB that each chip sends"
    return [
        f"gradients are all-reduced over fsdp ({share}; a reduce-scatter sends half): fewer chips"
        f" along fsdp may help (now {max(c.group for c in whole)})"
    ]


def _try(target: Target, planned: Planned) -> _Tried:
    step = make_step(planned)
    check_sizes(step)
    activations, mesh = _activations(planned, step), step.partitioner.mesh
    if target.chip.kind == "tpu":
        compiled = compile_step(step)
        program = compiled.program
        costs = None if program is None else step_costs.of_program(program, target, mesh)
        return _Tried(step, activations, compiled, costs)
    without_remat = _activations(planned.with_remat(False))
    temporaries, traffic = arithmetic.estimate(
        planned.config, step, activations, without_remat, chunks=planned.chunks
    )
    program = arithmetic.partition(step)
    if program is None:
        with step.partitioner():
            done = work.traced(step.function, step.state, step.batch)
    else:
        done = work.compiled(program)
    held = bytes_of(step.state) + bytes_of(step.batch)
    compiled = Compiled(program, temporaries, code=0, held=held, padding=0)
    costs = step_costs.of_program(program, target, mesh, done._replace(bytes=float(traffic)))
    return _Tried(step, activations, compiled, costs)


def _activations(planned: Planned, step: Step | None = None) -> int:
    """Returns the bytes kept for the backward pass; with gradient caching, of embeddings and one chunk."""
    size = (step or make_step(planned)).activation_bytes()
    if planned.chunks == 1:
        return size
    objective = dataclasses.replace(planned.recipe.objective, chunks=1)
    one = planned.with_chunks(objective, planned.recipe.batch_size // planned.chunks)
    return size + make_step(one).activation_bytes()


def _advise(
    planned: Planned, tried: _Tried, memory: Memory, limit: int, target: Target, command: Command
) -> list[str]:
    partitioner = planned.partitioner
    fsdp, batch_size = partitioner.mesh.shape["fsdp"], planned.recipe.batch_size
    setting = advice.Setting(fsdp, planned.remat, planned.chunks, batch_size)
    backbone = planned.config.backbone

    @functools.cache
    def activations_of(setting: advice.Setting) -> int:
        objective = planned.recipe.objective
        if setting.chunks != planned.chunks:
            objective = dataclasses.replace(objective, chunks=setting.chunks)
        other = planned.with_chunks(objective, setting.batch_size).with_remat(setting.remat)
        return _activations(other)

    def traced(new: advice.Setting) -> float:
        """Returns the bytes of kept activations, and of activations recomputed for one block."""
        new = new._replace(fsdp=setting.fsdp)
        block = activations_of(new._replace(remat=False)) - activations_of(new)
        return activations_of(new) + max(block, 0) / backbone.num_layers

    # The compiled program may keep less memory than JAX traced. Gathered weights do not depend on the rows.
    known = max(memory.temporaries - memory.gradients, 0)
    gathered = min(arithmetic.gathered_weights(planned.config, tried.step.num_parameters), known)
    known -= gathered
    share = min(1.0, known / max(traced(setting), 1))
    rest = max(known - traced(setting), 0)
    ways = (setting.remat, *setting.recomputing_more())
    kept_by = {remat: share * activations_of(setting._replace(remat=remat)) for remat in ways}
    rows = setting.batch_size / setting.chunks
    costs = advice.Costs(
        state=memory.state + memory.gradients,
        activations=kept_by,
        rest=rest,
        fixed=memory.batch + memory.code + gathered,
        traced=lambda new: share * traced(new) + rest * new.batch_size / new.chunks / rows,
    )
    free = partitioner.mesh.shape["data"] * partitioner.mesh.shape["fsdp"]
    found = advice.suggest(
        setting,
        costs,
        limit=limit,
        target=target,
        mesh=planned.recipe.mesh,
        fsdp=[n for n in range(1, free + 1) if free % n == 0 and backbone.embed_dim % n == 0],
        divisor=partitioner.batch_divisor(),
        can=command.flags.keys(),
    )
    lines = []
    for change in found:
        lines.append(f"{change.words} (about {gib(change.size)} GiB on each chip):")
        lines.append(f"  {command.changed(change.settings)}")
    return lines


def _describe(planned: Planned, step: Step) -> str:
    config = planned.config
    backbone = config.backbone
    remats: dict[Remat, str] = {
        False: "no remat",
        "weights": "remat except products and gathered weights",
        "products": "remat except products",
        "kernels": "remat except what kernels read",
        True: "remat",
    }
    how = [backbone.dtype, remats[backbone.remat]]
    how += ["scanned layers"] if backbone.scan_layers else []
    kind = (backbone.title or type(backbone).__name__).removesuffix("Config").removesuffix(" encoder")
    what = f"{kind} {backbone.num_layers} x {backbone.embed_dim}"
    if isinstance(config, DualEncoderConfig):
        what = f"{config.sharing.upper().replace('_', '-')} of {what}"
    elif isinstance(config, Seq2SeqConfig):
        what = f"{what}, a decoder of {config.num_decoder_layers} layers"
    elif isinstance(config, MultiVectorConfig):
        what = f"{what}, {config.dimension} dimensions a token"
    return f"{what}, {step.num_parameters / 1e6:,.0f} M parameters; {', '.join(how)}"


def _describe_batch(planned: Planned) -> str:
    tokens = [feature for feature in planned.features.values() if isinstance(feature, Tokens)]
    what = "pairs" if sum(feature.count is None for feature in tokens) == 2 else "texts"
    lengths = " + ".join(f"{f.length}" if f.count is None else f"{f.count} x {f.length}" for f in tokens)
    parts = f", embedded in {planned.chunks} chunks" if planned.chunks > 1 else ""
    size = planned.recipe.batch_size
    total = size * sum(math.prod(feature.shape) for feature in tokens)
    return f"{size} {what} of {lengths} tokens, {total:,} in all{parts}"
