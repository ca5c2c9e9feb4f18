"""Command: trains a model, or resumes a run."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.choices import Rules, with_flags_of
from jaxir.runtime.cpu import restart_with_huge_pages
from jaxir.storage.outputs import writes
from jaxir.training.run.recipe import Recipe


@Rules(
    one_of=("steps", "epochs"),
    gives_way={"min_steps": "epochs"},
    also_called={"output_dir": "output"},
    hands_over={"plan": "jaxir.plan:plan"},
    instead_of_gin="recipe",
)
@writes(output_dir="run")
@with_flags_of(Recipe)
def train(*, output_dir: str, recipe: str | None = None, **settings: Any) -> int:
    """Trains a dual encoder, or resumes the run in the output directory.

    The model, the objective and the data come from gin files (see gin/). The flags below override them, and
    so do flags for any setting of an object in them: --learning_rate=1e-4 sets the optimizer's.
    RUN/config.gin records all settings: --gin_file=RUN/config.gin repeats the run.

    The output directory is a model for every other command: its best checkpoint by the dev metric, else its
    latest. Run the same command again to resume after an interruption; the final parameters are the same as
    without one. SIGTERM and Ctrl-C save a checkpoint first; the exit status is then 143 or 130. On several
    machines, start the command once on each: TPU pods are detected, other machines need
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (docs/sharding.md).

    Args:
      output_dir: directory of the run, new or to be resumed; local or gs://BUCKET/PATH.
      recipe: a Python file that defines the recipe by `def recipe() -> Recipe`, instead of gin files. Flags
        replace its fields. RUN/recipe.py records the recipe: --recipe=RUN/recipe.py repeats the run.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides XLA's log messages
    from jaxir.runtime.distributed import joined, say
    from jaxir.training import trainer
    from jaxir.training.run import recipe_file

    with joined():
        if recipe is None:
            made, how = Recipe(**settings), {"on_start": _write_gin, "bindings": _gin_bindings}
        else:
            made = recipe_file.with_typed(recipe_file.read_recipe(recipe), settings)
            how = {"on_start": functools.partial(recipe_file.write_recipe, recipe, settings)}
        result = trainer.train(made, output_dir, **how)
        best = ""
        if result.best_step is not None:
            best = f"; best {made.dev_metric} {result.best_value:.4f} at step {result.best_step}"
        if result.stopped_by is None:
            done = "was already complete" if result.started_at == result.step else "is complete"
            early = f"stopped early at step {result.step} of {result.steps}"
            ended = f"{result.step} steps" if result.step == result.steps else early
            say(f"{output_dir} {done}: {ended}{best}")
            return 0
        say(
            f"{output_dir}: stopped by {result.stopped_by.name}; step {result.step} of {result.steps} is"
            f" saved{best}; run the same command again to resume"
        )
        return 128 + result.stopped_by


def _write_gin(run_dir: Path) -> None:
    """Writes the gin bindings of the run, if there are any, so that it can be repeated."""
    if "gin" not in sys.modules:
        return
    from jaxir.cli import gin_config
    from jaxir.storage.files import atomic_file

    config = gin_config.operative_config()
    if config is not None:
        with atomic_file(run_dir / "config.gin") as file:
            file.write(config)


def _gin_bindings(function: Any) -> dict[str, Any]:
    """Returns gin's bindings of `function`'s parameters, which are part of the run's fingerprint."""
    gin = sys.modules.get("gin")
    if gin is None or not hasattr(function, "__wrapped__"):
        return {}
    try:
        return gin.get_bindings(function)
    except ValueError:  # raised if the function is wrapped, but not by gin
        return {}


if __name__ == "__main__":
    restart_with_huge_pages("jaxir.train")
    cli.start("jaxir.train:train", "--gin_file=gin/quickstart.gin --output_dir=run")
