"""Command: plans a training run: the memory, time and cost that it needs."""

from __future__ import annotations

from typing import Any

from jaxir import cli
from jaxir.core.choices import Rules, check_idle, with_flags_of
from jaxir.core.values import Positive
from jaxir.training.run.recipe import Recipe

# Fields of a recipe that determine a training step, and `epochs`, which a plan refuses because it reads no
# data.
OF_A_STEP = (
    *("model", "objective", "steps", "epochs", "batch_size", "optimizer", "mesh", "num_negatives", "frozen"),
    "seed",
)


@Rules(one_of=("steps", "epochs"), bound_as="jaxir.train:train", instead_of_gin="recipe")
@with_flags_of(Recipe, only=OF_A_STEP)
def plan(
    topology: str,
    *,
    recipe: str | None = None,
    search: bool = False,
    prices: list[str] | None = None,
    hours: Positive | None = None,
    **settings: Any,
) -> int:
    """Plans a training run: compiles its step for chips that this machine lacks, and prints what it needs.

    Takes the same gin files and flags as `jaxir.train`, but reads neither data nor weights, needs no output
    directory and trains nothing. Prints whether the step fits and how long the run takes, then memory, time
    and traffic; the exit status is 1 if the chips have too little memory. See docs/planning.md.

    Args:
      topology: the chips: v5p:4x4x4 (TPUs: compiles) or gpu:8xh100 (GPUs: estimates by arithmetic).
      recipe: a Python file that defines the recipe by `def recipe() -> Recipe`, instead of gin files.
      search: find the fastest mesh, rematerialisation, chunks and scan by compiling some of them; topology
        may then be several TPU slices, v5e:2x2,v5e:4x4. Compiled programs are kept: the same command
        continues where it was stopped.
      prices: price per chip and hour, v5e=1.2,v5p=4.2; prints the run's cost, and a search's cheapest slice.
      hours: with --search, the maximum number of hours that the run may take.
    """
    from jaxir.training.run.recipe_file import read_recipe, with_typed

    made = Recipe(data=None, **settings) if recipe is None else with_typed(read_recipe(recipe), settings)
    if search:
        from jaxir.planning import slices

        return slices.run(topology, made, prices=prices, hours=hours)
    check_idle(plan, "--search", hours=hours)
    from jaxir.planning import run_plan
    from jaxir.planning.typed import Command

    # Maps each setting that the printed advice changes to its flags.
    flags = {
        "topology": ["--plan" if "jaxir.train" in cli.TYPED else "--topology"],
        "prices": ["--prices"],
        "batch_size": ["--batch_size"],
    }
    if recipe is None:
        flags |= _flags_of_gin(made)
    return run_plan.run(topology, made, prices=prices, command=Command(cli.TYPED, flags))


def _flags_of_gin(recipe: Recipe) -> dict[str, list[str]]:
    """Returns, for a recipe from gin files, {setting: flags that set it}."""
    from jaxir.cli.short_names import flags_of
    from jaxir.runtime.partitioning import MESH_AXES

    parts = {"remat": recipe.model, "chunks": recipe.objective, **dict.fromkeys(MESH_AXES, recipe.mesh)}
    flags = {n: flags_of(type(part).__name__, n) for n, part in parts.items() if hasattr(part, n)}
    return flags | {"batch_size": ["--batch_size", *flags_of("train", "batch_size")]}


if __name__ == "__main__":
    cli.start("jaxir.plan:plan", "--gin_file=gin/samtone_xxl.gin --topology=v5p:4x4x4")
