"""`python -m jaxir.plan`: what a run needs of chips and how long it takes, before anything is paid."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxir import cli
from jaxir.core.errors import UsageError
from jaxir.core.values import Positive, check_idle, hints_of, simple
from jaxir.training.run.recipe import Recipe

# What of a recipe decides a step; epochs, that a plan cannot count them.
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
    """Plans a training run: compiles its step for chips that are not there, and says what it needs of them.

    Takes what `jaxir.train` takes, gin files above all, but reads neither data nor weights, needs no output
    directory and trains nothing. Prints whether the step fits and how long the run takes, then memory, time
    and traffic; the exit status is 1 if the chips lack the memory. See docs/planning.md.

    Args:
      topology: the chips: v5p:4x4x4, or by arithmetic gpu:8xh100.
      search: find the mesh, rematerialisation, chunks and scan that are quickest, by compiling some of them;
        topology may then be several TPU slices, v5e:2x2,v5e:4x4. What was compiled is kept: the same command
        goes on where it was stopped.
      prices: of a chip and hour, v5e=1.2,v5p=4.2: what the run costs, and of a search the cheapest slice.
      hours: that the run may take, of the search.
    """
    return _plan(recipe, _flags(recipe), topology, search, prices, hours)


def plan_recipe(
    recipe: str,
    *,
    topology: str,
    search: bool = False,
    prices: list[str] | None = None,
    hours: Positive | None = None,
    **typed: Any,
) -> int:
    """Plans the recipe that a Python file makes: `def recipe() -> Recipe`.

    Args:
      recipe: the file.
      topology: as for `plan`, and so are the next three.
      search: likewise.
      prices: likewise.
      hours: likewise.
      **typed: fields of the recipe that are flags.
    """
    from jaxir.training.run.recipe_file import read_recipe, with_typed

    if any(word.startswith("--gin") for word in cli.TYPED):
        raise UsageError("--recipe is a whole recipe in Python: leave out gin files and --gin. bindings")
    flags = {"topology": ["--topology"], "prices": ["--prices"], "batch_size": ["--batch_size"]}
    return _plan(with_typed(read_recipe(recipe), typed), flags, topology, search, prices, hours)


_HINTS = hints_of(Recipe)
plan_recipe.__signature__ = inspect.Signature(
    [
        *(p for p in inspect.signature(plan_recipe).parameters.values() if p.name != "typed"),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in OF_A_STEP
            if simple(_HINTS[name]) is not None
        ),
    ]
)


def _plan(
    recipe: Recipe,
    flags: Mapping[str, Sequence[str]],
    topology: str,
    search: bool,
    prices: list[str] | None,
    hours: float | None,
) -> int:
    """Prints a plan or a search; `flags` are those that set each thing that advice may change."""
    if search:
        from jaxir.planning import slices

        return slices.run(topology, recipe, prices=prices, hours=hours)
    check_idle(plan, "--search", hours=hours)
    from jaxir.planning import run_plan as planning
    from jaxir.planning.typed import Command

    return planning.run(topology, recipe, prices=prices, command=Command(cli.TYPED, flags))


def _flags(recipe: Recipe) -> dict[str, list[str]]:
    """Returns the flags that change a recipe of gin files."""
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
    cli.end(
        cli.main(
            "jaxir.plan:plan",
            example="python -m jaxir.plan --gin_file=gin/samtone_xxl.gin --topology=v5p:4x4x4",
        )
    )
