"""Command: trains a model, or resumes a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.errors import UsageError
from jaxir.runtime.cpu import restart_with_huge_pages
from jaxir.storage.outputs import writes
from jaxir.training.run.recipe import Recipe


@cli.one_of("steps", "epochs")
@cli.gives_way(min_steps="epochs")
@cli.also_called(output_dir="output")
@cli.hands_over(plan="jaxir.plan:plan", recipe="jaxir.train:train_recipe")
@writes(output_dir="run")
@cli.takes(Recipe)
def train(recipe: Recipe, *, output_dir: str) -> int:
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
    """
    return _train(lambda: recipe, output_dir, bindings=_gin_bindings, on_start=_write_gin)


@cli.takes_typed(Recipe)
@writes(output_dir="run")
def train_recipe(recipe: str, *, output_dir: str, **typed: Any) -> int:
    """Trains the recipe that a Python file defines by `def recipe() -> Recipe`.

    Flags of the command line replace fields of the recipe. RUN/recipe.py records the recipe:
    --recipe=RUN/recipe.py repeats the run.

    Args:
      recipe: path of the Python file.
      output_dir: as for `train`.
      **typed: fields of the recipe that are flags.
    """
    from jaxir.training.run.recipe_file import read_recipe, with_typed, write_recipe

    if any(word.startswith("--gin") for word in cli.TYPED):
        raise UsageError("--recipe is a complete recipe in Python: leave out gin files and --gin. bindings")
    return _train(
        lambda: with_typed(read_recipe(recipe), typed),
        output_dir,
        on_start=lambda run: write_recipe(recipe, typed, run),
    )


def _train(
    make: Callable[[], Recipe], output_dir: str, *, on_start: Callable[[Path], None], **bindings: Any
) -> int:
    """Trains the recipe that `make` returns, prints how the run ended, and returns the exit status."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides XLA's log messages
    from jaxir.runtime.distributed import maybe_initialize_distributed, say, together
    from jaxir.training import trainer

    maybe_initialize_distributed()
    with together():
        recipe = make()
        result = trainer.train(recipe, output_dir, on_start=on_start, **bindings)
        best = ""
        if result.best_step is not None:
            best = f"; best {recipe.dev_metric} {result.best_value:.4f} at step {result.best_step}"
        if result.stopped_by is None:
            done = "was already complete" if result.started_at == result.steps else "is complete"
            say(f"{output_dir} {done}: {result.step} steps{best}")
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
    except ValueError:  # the function is wrapped, but not by gin
        return {}


if __name__ == "__main__":
    restart_with_huge_pages("jaxir.train")
    cli.start("jaxir.train:train", "--gin_file=gin/quickstart.gin --output_dir=run")
