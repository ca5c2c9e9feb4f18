"""`python -m jaxir.plan`: what a run needs of chips and how long it takes, before anything is paid."""

from __future__ import annotations

from jaxir import cli
from jaxir.training.recipe import Recipe

# What of a recipe decides a step; epochs, that a plan cannot count them.
OF_A_STEP = (
    *("model", "objective", "steps", "epochs", "batch_size", "optimizer", "mesh", "num_negatives", "frozen"),
    "seed",
)


@cli.one_of("steps", "epochs")
@cli.bound_as("jaxir.train:train")
@cli.takes(Recipe, only=OF_A_STEP, data=None)
def plan(recipe: Recipe, *, topology: str) -> int:
    """Plans a training run: compiles its step for chips that are not there, and says what it needs of them.

    Takes what `jaxir.train` takes, gin files above all, but reads neither data nor weights, needs no output
    directory and trains nothing. Prints memory, time and traffic; the exit status is 1 if the chips lack the
    memory. See docs/planning.md.

    Args:
      topology: the chips: v5p:4x4x4, or by arithmetic gpu:8xh100.
    """
    from jaxir.planning import plan as planning

    return planning.run(topology, recipe)


if __name__ == "__main__":
    cli.end(
        cli.main(
            "jaxir.plan:plan",
            example="python -m jaxir.plan --gin_file=gin/samtone_xxl.gin --topology=v5p:4x4x4",
        )
    )
