"""`python -m jaxir.train --plan=...`: what a run needs and how long it takes, before anything is paid."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxir.interop.build import Source
from jaxir.interop.stored import EncoderSettings
from jaxir.partitioning import MeshConfig
from jaxir.planning import (
    activations,
    advice,
    architecture,
    arithmetic,
    collectives,
    devices,
    roofline,
    targets,
    work,
)
from jaxir.planning.collectives import Collective
from jaxir.planning.hlo import Program
from jaxir.planning.program import (
    Compiled,
    Recipe,
    Step,
    bytes_of,
    compile_step,
    compiler_settings,
    make_step,
)
from jaxir.planning.report import Memory, Plan, render
from jaxir.planning.targets import Target
from jaxir.training.loop import check_settings
from jaxir.training.memory import fit_chunks
from jaxir.training.optimizers import AdamW, Optimizer


def run(
    text: str,
    *,
    model: Source,
    objective: Any,
    optimizer: Optimizer | None,
    mesh: MeshConfig | None,
    steps: int,
    batch_size: int,
    num_negatives: int,
    frozen: Sequence[str],
    seed: int,
) -> int:
    """Prints the plan of a run; returns 0 if it fits, else 1.

    Reads neither data nor weights, and needs no network. It must be the first to use JAX in its process.

    Args:
      text: the machine, such as "v5p:4x4x4" or "gpu:8xh100".
      model: what training would build, such as Pretrained(...).
      objective: the training method.
      optimizer: as for training.
      mesh: as for training.
      steps: of the run.
      batch_size: pairs of a step.
      num_negatives: hard negatives of each pair.
      frozen: patterns of names of what is not trained.
      seed: of dropout.

    Raises:
      UserError: no such machine, settings that fit neither it nor each other, or no TPU compiler.
    """
    target = targets.parse(text)
    found = devices.get(target)
    config, settings = architecture.describe(model)
    # A program compiled for a machine that is not there is of no use to a later process.
    jax.config.update("jax_enable_compilation_cache", False)
    partitioner = advice.build_mesh(mesh or MeshConfig(), found, target)
    check_settings({"steps": steps, "batch_size": batch_size}, partitioner, objective)
    recipe = Recipe(
        config=config,
        settings=settings,
        objective=objective,
        optimizer=optimizer or AdamW(),
        partitioner=partitioner,
        steps=steps,
        batch_size=batch_size,
        num_negatives=num_negatives,
        frozen=frozen,
        seed=seed,
    )
    plan = make(target, recipe)
    print(render(plan))
    return 0 if plan.fits else 1


class _Tried(NamedTuple):
    """A step, what it keeps for its backward pass, its program and that program's work, if there is one."""

    step: Step
    kept: activations.Kept
    compiled: Compiled
    done: work.Work | None


def make(target: Target, recipe: Recipe) -> Plan:
    """Makes the plan of a run on `target`, whose chips are those of the recipe's partitioner.

    Raises:
      UserError: chunks="auto", and no number of chunks fits.
    """
    config, settings, partitioner = recipe.config, recipe.settings, recipe.partitioner
    start = time.monotonic()
    if getattr(recipe.objective, "chunks", 1) == "auto":
        objective, tried, _ = fit_chunks(
            recipe.objective,
            lambda chosen: _try(target, dataclasses.replace(recipe, objective=chosen)),
            rows=recipe.batch_size // partitioner.batch_divisor(),
            limit=int(target.chip.memory),
            size_of=lambda tried: tried.compiled.size,
        )
        recipe = dataclasses.replace(recipe, objective=objective)
    else:
        tried = _try(target, recipe)
    seconds = time.monotonic() - start
    step, kept, compiled, done = tried
    program = compiled.program
    with partitioner():
        forward = work.traced(step.forward, step.trained, step.state, step.batch)

    memory = Memory(
        parameters=bytes_of((step.state.params, step.state.auxiliary, step.state.statistics)),
        optimizer=bytes_of(step.state.opt_state),
        batch=bytes_of(step.batch),
        gradients=kept.gradients,
        activations=kept.activations,
        temporaries=compiled.temporaries,
        code=compiled.code + compiled.padding,
    )
    limit = compiled.limit or int(target.chip.memory)
    short_by = compiled.short_by or max(memory.total - limit, 0)
    found = [] if program is None else collectives.read(program, partitioner.mesh)
    in_order = list(partitioner.mesh.devices.flat)
    setting = advice.Setting(
        partitioner.mesh.shape["fsdp"],
        config.backbone.remat,
        getattr(recipe.objective, "chunks", 1),
        recipe.batch_size,
    )
    return Plan(
        target=target,
        compiled=target.chip.kind == "tpu",
        mesh=dict(partitioner.mesh.shape),
        model=_describe(recipe, step),
        num_parameters=sum(leaf.size for leaf in jax.tree.leaves(step.state.params)),
        batch=_describe_batch(recipe),
        memory=memory,
        limit=limit,
        short_by=short_by,
        steps=recipe.steps,
        useful_flops=3 * forward.flops,
        work=done,
        collectives=None if done is None else found,
        roofline=None if done is None else roofline.estimate(done, found, target, in_order),
        warnings=[
            *warn(found, recipe.batch_size, settings),
            *warn_of_whole_gradients(found, step.state.params),
            *_uncounted(program),
        ],
        advice=_advise(setting, memory, kept, limit, target, recipe) if short_by else [],
        seconds=seconds,
        settings=compiler_settings(),
    )


def warn(found: Sequence[Collective], batch_size: int, settings: EncoderSettings) -> list[str]:
    """Names collectives that move token-level activations of the whole batch: a sharding that was lost."""
    lengths = {settings.query_max_length, settings.passage_max_length}
    lines = []
    for c in found:
        # What is not differentiated is the optimizer's, whose arrays may have the same sizes by chance.
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
                    f"a {c.kind} over {over} makes activations of the whole batch, {what}, on every chip:"
                    f" {c.source}"
                )
                break
    return lines


def warn_of_whole_gradients(found: Sequence[Collective], params: Any) -> list[str]:
    """Points out gradients that are summed whole over "fsdp", for which a reduce-scatter sends half as much.

    The TPU compiler (libtpu 0.0.42) makes one of up to 16 chips of a torus, and reduces whole over 32 or 64.
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
        f"gradients are summed whole over fsdp, not scattered ({share}; scattering sends half): fewer chips"
        f" along fsdp may help (now {max(c.group for c in whole)})"
    ]


def _uncounted(program: Program | None) -> list[str]:
    if program is None or not program.endless:
        return []
    return [
        f"{len(program.endless)} loops do not say how often they turn and count once: times are too short"
    ]


def _try(target: Target, recipe: Recipe) -> _Tried:
    step = make_step(recipe)
    kept = _kept(recipe, step)
    if target.chip.kind == "tpu":
        compiled = compile_step(step)
        program = compiled.program
        return _Tried(step, kept, compiled, None if program is None else work.compiled(program))
    guess = arithmetic.estimate(
        recipe.config,
        step,
        kept,
        _kept(recipe.with_remat(False)),
        chunks=getattr(recipe.objective, "chunks", 1),
    )
    program = arithmetic.partition(step)
    if program is None:
        with step.partitioner():
            done = work.traced(step.function, step.state, step.batch)
    else:
        done = work.compiled(program)
    held = bytes_of(step.state) + bytes_of(step.batch)
    compiled = Compiled(program, guess.temporaries, code=0, held=held, padding=0, limit=None, short_by=0)
    return _Tried(step, kept, compiled, done._replace(bytes=float(guess.traffic)))


def _kept(recipe: Recipe, step: Step | None = None) -> activations.Kept:
    """Returns what a step keeps; with gradient caching that is the embeddings and what one chunk keeps."""
    kept = activations.kept(make_step(recipe) if step is None else step)
    chunks = getattr(recipe.objective, "chunks", 1)
    if chunks == 1:
        return kept
    objective = dataclasses.replace(recipe.objective, chunks=1)
    one = dataclasses.replace(recipe, objective=objective, batch_size=recipe.batch_size // chunks)
    part = activations.kept(make_step(one))
    return kept._replace(
        activations=kept.activations + part.activations, largest=max(kept.largest, part.largest)
    )


def _advise(
    setting: advice.Setting,
    memory: Memory,
    kept: activations.Kept,
    limit: int,
    target: Target,
    recipe: Recipe,
) -> list[str]:
    partitioner = recipe.partitioner
    kept_remat = _kept(recipe.with_remat(True))
    # What the compiler keeps of the activations may be less than what JAX wrote down.
    known = max(memory.temporaries - kept.gradients, 0)
    activation = min(kept.activations, known)
    costs = advice.Costs(
        state=memory.state + kept.gradients,
        activations=activation,
        activations_remat=min(kept_remat.activations, activation),
        rest=known - activation,
        fixed=memory.batch + memory.code,
    )
    free = partitioner.mesh.shape["data"] * partitioner.mesh.shape["fsdp"]
    return advice.suggest(
        setting,
        costs,
        limit=limit,
        target=target,
        fsdp=[n for n in range(1, free + 1) if free % n == 0],
        divisor=partitioner.batch_divisor(),
    )


def _describe(recipe: Recipe, step: Step) -> str:
    config = recipe.config
    backbone = config.backbone
    count = sum(leaf.size for leaf in jax.tree.leaves(step.state.params))
    how = [backbone.dtype, "remat" if backbone.remat else "no remat"]
    how += ["scanned layers"] if backbone.scan_layers else []
    kind = type(backbone).__name__.removesuffix("Config")
    return (
        f"{config.sharing.upper().replace('_', '-')} of {kind} {backbone.num_layers} x {backbone.embed_dim},"
        f" {count / 1e6:,.0f} M parameters; {', '.join(how)}"
    )


def _describe_batch(recipe: Recipe) -> str:
    settings, num_negatives = recipe.settings, recipe.num_negatives
    tokens = settings.query_max_length + settings.passage_max_length * (1 + num_negatives)
    negatives = f" x (1 + {num_negatives} negatives)" if num_negatives else ""
    chunks = getattr(recipe.objective, "chunks", 1)
    parts = f", embedded in {chunks} chunks" if chunks > 1 else ""
    lengths = f"{settings.query_max_length} + {settings.passage_max_length}{negatives}"
    size = recipe.batch_size
    return f"{size} pairs of {lengths} tokens, {size * tokens:,} in all{parts}"
