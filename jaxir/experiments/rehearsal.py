"""What is wrong with training runs of an experiment, found before any directory is made.

In a process of its own: to read a recipe is to import what it names, which may take a TPU that the runs need.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.training.run.recipe import Recipe

_CHILD = "from jaxir import cli; from jaxir.experiments import rehearsal; cli.end(rehearsal.run_typed())"


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
    if said := _said_by("training", runs):
        raise UserError(f"training would be refused: {said}")


def check_typed(commands: Iterable[Sequence[str]]) -> None:
    """Checks complete runs of which nothing is noted, for their commands were typed, as `typed` does.

    Args:
      commands: what follows `python` in those that would have trained them.

    Raises:
      UserError: one of them was trained with other settings.
    """
    if said := _said_by("typed", [c[2:] for c in commands]):
        raise UserError(said)


def _said_by(check: str, runs: Sequence[Sequence[str]]) -> str:
    """Returns what a check says of the first run that is wrong, a list of arguments; nothing if none is."""
    if not runs:
        return ""
    typed = json.dumps([check, runs])
    done = subprocess.run([sys.executable, "-c", _CHILD], input=typed, capture_output=True, text=True)
    if not done.returncode:
        return ""
    said = done.stderr.strip().rpartition("\n")[2] or f"its check ended with status {done.returncode}"
    return said.removeprefix("error: ")


def run_typed() -> int:
    """Makes the check of the runs that standard input names, and returns the exit status."""
    check, runs = json.load(sys.stdin)
    for arguments in runs:
        if status := cli.main(f"jaxir.experiments.rehearsal:{check}", arguments):
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
    from jaxir.runtime.partitioning import MeshConfig
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


@cli.one_of("steps", "epochs")
@cli.bound_as("jaxir.train:train")
@cli.takes(Recipe)
def typed(recipe: Recipe, *, output_dir: str) -> None:
    """Checks that a run was trained with this recipe, by its config.gin; one without that is taken as it is.

    Args:
      output_dir: of the run. It, data and models may have lain elsewhere: paths count by their last part.
    """
    from jaxir.cli import gin_config

    path = Path(output_dir) / "config.gin"
    if not path.exists():
        return
    then = _settings(path.read_text(encoding="utf-8"))
    now = _settings(gin_config.operative_config() or "")
    if then != now:
        difference = sorted(then - now) or sorted(now - then)
        raise UserError(
            f"{output_dir} was trained with {'' if then - now else 'no '}{difference[0]:.160}: give another"
            f" output_dir, remove that directory, or, to take it as it is, its config.gin"
        )


def _settings(config: str) -> set[str]:
    """Returns what a gin file sets, without the directories of paths."""
    from jaxir.cli import gin_config

    settings = gin_config.settled("jaxir.train:train", config)
    return {
        re.sub(r"""(?<=['"])[^'"\n]*/(?=[^'"/\n]+['"])""", "", f"{name} = {value}")
        for name, value in settings.items()
    }
