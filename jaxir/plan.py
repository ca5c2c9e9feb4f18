"""Command: plans a training run: the memory, time and cost that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxir import cli
from jaxir.core.errors import UsageError
from jaxir.core.values import Positive, check_idle
from jaxir.training.run.recipe import Recipe

# Fields of a recipe that determine a training step; and epochs, which a plan refuses, as it reads no data.
OF_A_STEP = (
    *("model", "objective", "steps", "epochs", "batch_size", "optimizer", "mesh", "num_negatives", "frozen"),
    "seed",
)


@cli.one_of("steps", "epochs")
@cli.bound_as("jaxir.train:train")
@cli.hands_over(recipe="jaxir.plan:plan_recipe")
@cli.takes(Recipe, only=OF_A_STEP, data=None)
def plan(
    recipe: Recipe,
    *,
    topology: str,
    search: bool = False,
    prices: list[str] | None = None,
    hours: Positive | None = None,
) -> int:
    """Plans a training run: compiles its step for chips that this machine lacks, and prints what it needs.

    Takes the same gin files and flags as `jaxir.train`, but reads neither data nor weights, needs no output
    directory and trains nothing. Prints whether the step fits and how long the run takes, then memory, time
    and traffic; the exit status is 1 if the chips have too little memory. See docs/planning.md.

    Args:
      topology: the chips: v5p:4x4x4 (TPUs: compiles) or gpu:8xh100 (GPUs: estimates by arithmetic).
      search: find the fastest mesh, rematerialisation, chunks and scan by compiling some of them; topology
        may then be several TPU slices, v5e:2x2,v5e:4x4. Compiled programs are kept: the same command
        continues where it was stopped.
      prices: price per chip and hour, v5e=1.2,v5p=4.2; prints the run's cost, and a search's cheapest slice.
      hours: with --search, the maximum number of hours that the run may take.
    """
    return _plan(recipe, _flags(recipe), topology, search, prices, hours)


@cli.takes_typed(Recipe, only=OF_A_STEP)
def plan_recipe(
    recipe: str,
    *,
    topology: str,
    search: bool = False,
    prices: list[str] | None = None,
    hours: Positive | None = None,
    **typed: Any,
) -> int:
    """Plans the recipe that a Python file defines by `def recipe() -> Recipe`.

    Args:
      recipe: path of the Python file.
      topology: as for `plan`.
      search: as for `plan`.
      prices: as for `plan`.
      hours: as for `plan`.
      **typed: fields of the recipe that are flags.
    """
    from jaxir.training.run.recipe_file import read_recipe, with_typed

    if any(word.startswith("--gin") for word in cli.TYPED):
        raise UsageError("--recipe is a complete recipe in Python: leave out gin files and --gin. bindings")
    flags = {"topology": ["--topology"], "prices": ["--prices"], "batch_size": ["--batch_size"]}
    return _plan(with_typed(read_recipe(recipe), typed), flags, topology, search, prices, hours)


def _plan(
    recipe: Recipe,
    flags: Mapping[str, Sequence[str]],
    topology: str,
    search: bool,
    prices: list[str] | None,
    hours: float | None,
) -> int:
    """Prints a plan or a search. `flags` has the flags of each setting that the printed advice changes."""
    if search:
        from jaxir.planning import slices

        return slices.run(topology, recipe, prices=prices, hours=hours)
    check_idle(plan, "--search", hours=hours)
    from jaxir.planning import run_plan as planning
    from jaxir.planning.typed import Command

    return planning.run(topology, recipe, prices=prices, command=Command(cli.TYPED, flags))


def _flags(recipe: Recipe) -> dict[str, list[str]]:
    """Returns the flags that set parts of a recipe of gin files."""
    from jaxir.cli.short_names import flags_of
    from jaxir.runtime.partitioning import MESH_AXES

    by_train = any(word.partition("=")[0] == "--plan" for word in cli.TYPED)
    flags = {
        "topology": ["--plan" if by_train else "--topology"],
        "prices": ["--prices"],
        "batch_size": ["--batch_size", *flags_of("train", "batch_size")],
    }
    parts = {"remat": recipe.model, "chunks": recipe.objective, **dict.fromkeys(MESH_AXES, recipe.mesh)}
    for name, part in parts.items():
        if hasattr(part, name):
            flags[name] = flags_of(type(part).__name__, name)
    return flags


if __name__ == "__main__":
    cli.start("jaxir.plan:plan", "--gin_file=gin/samtone_xxl.gin --topology=v5p:4x4x4")
