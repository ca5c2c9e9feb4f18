"""What training runs of an experiment would refuse at their beginning, found before any directory is made.

In a process of its own: to read a recipe is to import what it names, which may take a TPU that the runs need.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxir import cli
from jaxir.errors import UserError
from jaxir.training.recipe import Recipe

_CHILD = "from jaxir import cli, rehearsal; cli.end(rehearsal.run_typed())"


def rehearse(commands: Iterable[Sequence[str]], output_dir: Path) -> None:
    """Checks runs of `python -m jaxir.train` as `training` does.

    Args:
      commands: what follows `python` in each, of which those that differ by seed or place are checked once.
      output_dir: where the experiment lies.

    Raises:
      UserError: what the first one that is wrong would say.
    """
    own = [tuple(a for a in c[2:] if not a.startswith(("--seed=", "--output_dir="))) for c in commands]
    runs = [[*arguments, f"--output_dir={output_dir}"] for arguments in dict.fromkeys(own)]
    if not runs:
        return
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=json.dumps(runs), capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or f"its check ended with status {done.returncode}"
        raise UserError(f"training would be refused: {said.removeprefix('error: ')}")


def run_typed() -> int:
    """Checks the runs that are typed on standard input and returns the exit status."""
    for arguments in json.load(sys.stdin):
        if status := cli.main("jaxir.rehearsal:training", arguments):
            return status
    return 0


@cli.one_of("steps", "epochs")
@cli.bound_as("jaxir.train:train")
@cli.takes(Recipe)
def training(recipe: Recipe, *, output_dir: str) -> None:
    """Checks what can be known of a training run within seconds: settings, devices, the model, its objective.

    Args:
      output_dir: where the experiment lies; a model in there is still to be made.
    """
    from flax import nnx

    from jaxir.interop.build import outline_of
    from jaxir.partitioning import MeshConfig
    from jaxir.training.suite import evaluators_of

    if recipe.steps is not None:
        recipe = recipe.settled()
    recipe.check_batch((recipe.mesh or MeshConfig()).build())
    evaluators_of(recipe)
    source = getattr(recipe.model, "source", None)
    made_here = source is not None and Path(source).is_relative_to(output_dir)
    if made_here and getattr(recipe.model, "from_scratch", None):
        raise UserError(
            f"{source} would be trained in vain, for the run after it starts from random parameters: give"
            " FROM_SCRATCH=True by --bindings, which gives it to the first run alone, not in a gin file"
        )
    if not made_here:
        config, _, _ = outline_of(recipe.model)
        recipe.objective.check_model(nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0))))
