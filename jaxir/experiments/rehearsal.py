"""Finds mistakes in an experiment's training runs before any directory is made.

The checks run in their own process, because reading a recipe may claim a TPU that the runs need.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.choices import Rules, with_flags_of
from jaxir.core.errors import UserError
from jaxir.training.run.recipe import Recipe

_CHILD = "from jaxir import cli; from jaxir.experiments import rehearsal; cli.end(rehearsal.run_checks())"


def rehearse(commands: Iterable[Sequence[str]], output_dir: Path) -> None:
    """Checks commands with `training`, once for commands that differ only in seed or directory."""
    own = [tuple(a for a in c[2:] if not a.startswith(("--seed=", "--output_dir="))) for c in commands]
    runs = [[*arguments, f"--output_dir={output_dir}"] for arguments in dict.fromkeys(own)]
    if error := _first_error("training", runs):
        raise UserError(f"training would be refused: {error}")


def check_manual_runs(commands: Iterable[Sequence[str]]) -> None:
    """Checks with `manual` that complete runs without records were trained with these commands."""
    if error := _first_error("manual", [c[2:] for c in commands]):
        raise UserError(error)


def _first_error(check: str, runs: Sequence[Sequence[str]]) -> str:
    """Returns the error of the first run (a list of arguments) that the check refuses, or ""."""
    if not runs:
        return ""
    request = json.dumps([check, runs])
    done = subprocess.run([sys.executable, "-c", _CHILD], input=request, capture_output=True, text=True)
    if not done.returncode:
        return ""
    line = done.stderr.strip().rpartition("\n")[2] or f"the check ended with status {done.returncode}"
    return line.removeprefix("error: ")


def run_checks() -> int:
    """Runs the check that standard input requests, and returns the exit status."""
    check, runs = json.load(sys.stdin)
    for arguments in runs:
        if status := cli.main(f"jaxir.experiments.rehearsal:{check}", arguments):
            return status
    return 0


@Rules(one_of=("steps", "epochs"), bound_as="jaxir.train:train")
@with_flags_of(Recipe)
def training(*, output_dir: str, **settings: Any) -> None:
    """Checks what can be checked of a training run within seconds: settings, devices, model and objective.

    Args:
      output_dir: directory of the experiment. Models to start from that earlier runs will write there are not
        opened, because they do not exist yet.
    """
    from jaxir.interop.build import outline_of
    from jaxir.interop.model.stored import abstract_model
    from jaxir.runtime.partitioning import MeshConfig
    from jaxir.training.suite import evaluators_of

    recipe = Recipe(**settings)
    if recipe.steps is not None:
        recipe = recipe.settled()
    recipe.check_batch((recipe.mesh or MeshConfig()).build())
    evaluators_of(recipe)
    source = getattr(recipe.model, "source", None)
    made_here = source is not None and Path(source).is_relative_to(output_dir)
    if made_here and getattr(recipe.model, "from_scratch", None):
        raise UserError(
            f"{source} would be trained in vain, because the next run starts from random parameters: set"
            " FROM_SCRATCH=True with --bindings, which affects only the first run, not in a gin file"
        )
    if not made_here:
        config, _, _ = outline_of(recipe.model)
        recipe.objective.check_model(abstract_model(config))


@Rules(one_of=("steps", "epochs"), bound_as="jaxir.train:train")
@with_flags_of(Recipe)
def manual(*, output_dir: str, **settings: Any) -> None:
    """Checks by its config.gin that a run was trained with this recipe; a run without that file passes.

    Args:
      output_dir: directory of the run. Only last parts of paths are compared: files may have moved.
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
            f"{output_dir} was trained {'with' if then - now else 'without'} {difference[0]:.160}: give"
            f" another output_dir, remove that directory, or remove its config.gin to use it anyway"
        )


def _settings(config: str) -> set[str]:
    """Returns the settings of a gin file, with paths reduced to their last part."""
    from jaxir.cli import gin_config

    settings = gin_config.settled("jaxir.train:train", config)
    return {
        re.sub(r"""(?<=['"])[^'"\n]*/(?=[^'"/\n]+['"])""", "", f"{name} = {value}")
        for name, value in settings.items()
    }
