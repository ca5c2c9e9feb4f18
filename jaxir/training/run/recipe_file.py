"""Recipes as Python files: a function `recipe` that returns a `Recipe`."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError, suggest
from jaxir.storage.files import atomic_file
from jaxir.training.run.recipe import Recipe

FUNCTION = "recipe"
MODULE = "recipe_file"  # name of every recipe's module, constant because a resumed run compares names
NAME = "recipe.py"  # the file's name in the run's directory
# A flag that sets the length of a run resets the recipe's other settings of length, as in gin recipes.
LENGTHS = {"steps": {"epochs": None, "min_steps": 1}, "epochs": {"steps": None, "min_steps": 1}}


def read_recipe(file: str | Path) -> Recipe:
    """Runs a Python file, which may import modules beside it, and returns its recipe."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--recipe must be an existing Python file, such as my_recipe.py, not {file}")
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, beside)
    spec = importlib.util.spec_from_file_location(MODULE, path)
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    make = getattr(module, FUNCTION, None)
    if not inspect.isfunction(make):
        raise UserError(
            f"{file} has no function {FUNCTION}{suggest(FUNCTION, vars(module))}: write"
            f" `def {FUNCTION}() -> Recipe` with jaxir.training.run.recipe.Recipe"
        )
    made = make()
    if not isinstance(made, Recipe):
        raise UserError(f"{file}: {FUNCTION}() must return a Recipe, not {made!r:.80}")
    return made


def with_typed(recipe: Recipe, typed: Mapping[str, Any]) -> Recipe:
    """Returns `recipe` with the fields in `typed`, which were given as flags on the command line."""
    others: dict[str, Any] = {}
    for name in LENGTHS.keys() & typed.keys():
        others |= LENGTHS[name]
    return dataclasses.replace(recipe, **(others | dict(typed)))


def write_recipe(file: str | Path, typed: Mapping[str, Any], run_dir: Path) -> None:
    """Writes RUN/recipe.py: the content of the recipe file and, below it, the flags in `typed`."""
    text = Path(file).read_text(encoding="utf-8")
    if typed:
        text = text.rstrip("\n") + (
            "\n\n\n# The flags of the run\n"
            "from jaxir.training.run.recipe_file import with_typed\n\n\n"
            f"def {FUNCTION}(without_flags={FUNCTION}):\n"
            f"    return with_typed(without_flags(), {dict(typed)!r})\n"
        )
    with atomic_file(run_dir / NAME) as out:
        out.write(text)
