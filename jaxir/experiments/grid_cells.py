"""From the axes of a grid to its cells, and from a cell to the commands that train and test it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError
from jaxir.core.installation import find_recipe, missing_recipe
from jaxir.data.formats.sources import BeirFolder
from jaxir.evaluation.datasets import parse_dataset
from jaxir.experiments import inputs
from jaxir.experiments.experiment_settings import GridSettings, Variant
from jaxir.experiments.methods import Method, Stage, parse_method

RESULT = "test.json"
# What a first stage starts from, in gin/models; a later one starts from the stage before.
PRETRAINED = ("MODEL", "INITIAL_CHECKPOINT_PATH", "TOKENIZER", "FROM_SCRATCH")
JUDGES = {"sts": "file or folder of rated pairs", "senteval": "folder of transfer tasks"}
# What a grid sets in the runs of a cell, and its own flag for that.
SET_BY_GRID = {"STEPS": "--steps", "SHARING": "--sharing", "DATA": "--datasets", "SEED": "--seeds"}
SHARING_TITLES = {"ade": "ADE", "ade_spl": "ADE-SPL", "sde": "SDE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the results: everything of a cell but the data set and the seed."""

    model: str
    sharing: str
    objective: str
    variant: str


class Commands(NamedTuple):
    """The commands of a cell, `python` left out.

    Attributes:
      training: one for each stage, with its run directory.
      testing: the one that writes the scores on the data set.
      judging: one for each judge, by its name.
    """

    training: tuple[tuple[Path, tuple[str, ...]], ...]
    testing: tuple[str, ...]
    judging: Mapping[str, tuple[str, ...]] = {}

    def lines(self) -> tuple[str, ...]:
        """The commands as they can be typed."""
        everything = [*(arguments for _, arguments in self.training), self.testing, *self.judging.values()]
        return tuple(shlex.join(["python", *arguments]) for arguments in everything)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One model to train and to test.

    Attributes:
      row: its row in the results.
      dataset: the name of its data set.
      seed: its seed.
      directory: where everything of it lies.
      commands: what makes it.
      identity: the commands, the judges' left out, as they are wherever grid and data lie: two cells of one
        identity are the same.
      inputs: what they read, by name and content.
      judged_by: what each judge reads, likewise.
    """

    row: Row
    dataset: str
    seed: int
    directory: Path
    commands: Commands
    identity: tuple[str, ...]
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    judged_by: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def result(self) -> Path:
        """The scores on the test split."""
        return self.directory / RESULT

    @property
    def judged(self) -> dict[str, Path]:
        """What each judge has said."""
        return {name: _of_judge(self.directory, name) for name in self.commands.judging}

    @property
    def finished(self) -> bool:
        """Whether all results are there."""
        return self.result.exists() and all(path.exists() for path in self.judged.values())

    @property
    def name(self) -> str:
        """What the cell is called."""
        return self.directory.name


def plan_cells(grid: GridSettings, output_dir: Path) -> list[Cell]:
    """Lists the cells of a grid, seed by seed, so that a part of the grid is a grid of fewer seeds.

    Raises:
      UserError: an axis without values or with one twice, an unknown value, a file or data set that is not
        there, fewer steps than stages, or a binding of what the grid itself sets.
    """
    check_axes(grid)
    maker = _Maker(grid, output_dir)
    axes = (grid.seeds, maker.folders, grid.models, grid.sharing, grid.variants, maker.methods)
    return [
        *itertools.starmap(maker.trained, itertools.product(*axes)),
        *itertools.starmap(maker.untrained, itertools.product(maker.folders, grid.untrained)),
        *itertools.starmap(maker.scored, itertools.product(maker.folders, grid.runs)),
    ]


class _Maker:
    """Makes the cells of a grid; see `plan_cells`."""

    def __init__(self, grid: GridSettings, output_dir: Path):
        self.grid, self.place = grid, output_dir / "cells"
        self.methods = list(map(parse_method, grid.objectives))
        for bindings in (grid.bindings, *(variant.bindings for variant in grid.variants)):
            check_bindings(bindings, SET_BY_GRID)
            for method in self.methods:
                _check_leaves(method, bindings)
        self.folders = {name: BeirFolder(directory) for name, directory in map(parse_folder, grid.datasets)}
        self.judges = dict(map(parse_judge, grid.judges))
        for folder in self.folders.values():
            inputs.check_split(folder, grid.split)
        stages = max(len(method.stages) for method in self.methods)
        if grid.steps < stages:
            raise UserError(
                f"steps is {grid.steps}, but there must be at least one for each of {stages} stages"
            )
        check_recipes([*grid.recipe, *(stage.gin_file for method in self.methods for stage in method.stages)])
        check_recipes([*(file for v in grid.variants for file in v.gin_files), *map(model_file, grid.models)])
        self.data = {
            name: {f"data set {name}": inputs.of_collection(folder, "train", grid.split)}
            for name, folder in self.folders.items()
        }
        self.judged_by = {name: inputs.of_file(spec.partition(":")[2]) for name, spec in self.judges.items()}

    def trained(
        self, seed: str | int, dataset: str, model: str, sharing: str, variant: Variant, method: Method
    ) -> Cell:
        """Returns the cell of a model that is trained and tested."""
        grid, bindings = self.grid, [*self.grid.bindings, *variant.bindings]

        def commands(directory: Path, folder: str) -> Commands:
            shared = [f"SHARING={sharing}", f"DATA={gin_text(folder)}", *bindings]
            names = set(map(name_of, shared))
            training = []
            for stage, steps, run, start in stages_of(method, grid.steps, directory):
                given = [f"STEPS={steps}", *shared, *stage.bindings]
                given += [default for default in stage.defaults if name_of(default) not in names]
                if start is not None:
                    given = starting_from(start, given)
                files = [*grid.recipe, model_file(model), stage.gin_file, *variant.gin_files]
                training.append((run, train_command(files, given, int(seed), run)))
            return self._tests(directory, folder, f"{directory / 'model'}")._replace(training=tuple(training))

        files = [*grid.recipe, *(stage.gin_file for stage in method.stages), model_file(model)]
        read = inputs.of_training_splits(self.folders[dataset], f"data set {dataset}", bindings)
        read |= inputs.of_gin_files([*files, *variant.gin_files]) | inputs.of_named(bindings)
        size = Path(model).stem
        parts = [dataset, size, sharing, method.name, variant.name, f"seed{int(seed)}"]
        row = Row(model=size, sharing=sharing, objective=method.title, variant=variant.title)
        return self._cell(row, dataset, "-".join(filter(None, parts)), commands, read, seed)

    def untrained(self, dataset: str, text: str) -> Cell:
        """Returns the cell of NAME=MODEL, a model that is tested as it is."""
        name, _, model = text.partition("=")
        content = inputs.of_model(model)
        read = {} if content is None else {f"model {name}": content}

        def commands(directory: Path, folder: str) -> Commands:
            return self._tests(directory, folder, model)

        return self._cell(_row_of(name), dataset, f"{dataset}-{name}", commands, read)

    def scored(self, dataset: str, text: str) -> Cell:
        """Returns the cell of NAME=FILE, a run file."""
        name, _, file = text.partition("=")
        qrels = self.folders[dataset].qrels_path(self.grid.split)

        def commands(directory: Path, _: str) -> Commands:
            arguments = [f"--run={file}", f"--qrels={qrels}", f"--metrics={self.grid.metrics}"]
            return Commands((), ("-m", "jaxir.evaluate", *arguments, f"--output={directory / RESULT}"))

        read = {f"run {name}": inputs.of_file(file)}
        return self._cell(_row_of(name), dataset, f"{dataset}-{name}", commands, read)

    def _tests(self, directory: Path, folder: str, model: str) -> Commands:
        tested = ("-m", "jaxir.evaluate", f"--model={model}")
        asked = (f"--dataset=beir:{folder}", f"--split={self.grid.split}", f"--metrics={self.grid.metrics}")
        judging = {
            name: (*tested, f"--dataset={spec}", f"--output={_of_judge(directory, name)}")
            for name, spec in self.judges.items()
        }
        return Commands((), (*tested, *asked, f"--output={directory / RESULT}"), judging)

    def _cell(
        self,
        row: Row,
        dataset: str,
        name: str,
        commands: Callable[[Path, str], Commands],
        read: Mapping[str, str],
        seed: str | int | None = None,
    ) -> Cell:
        made = commands(self.place / name, str(self.folders[dataset].directory))
        return Cell(
            row=row,
            dataset=dataset,
            seed=int(self.grid.seeds[0] if seed is None else seed),
            directory=self.place / name,
            commands=made,
            identity=commands(Path("CELL"), "DATA")._replace(judging={}).lines(),
            inputs=self.data[dataset] | read,
            judged_by=self.judged_by if made.judging else {},
        )


def _row_of(name: str) -> Row:
    return Row(model="", sharing="", objective=name, variant="")


def train_command(files: Sequence[str], bindings: Sequence[str], seed: int, run: Path) -> tuple[str, ...]:
    """Returns what follows `python` in the command of a training run."""
    given = [*(f"--gin_file={file}" for file in files), *(f"--gin.{binding}" for binding in bindings)]
    return ("-m", "jaxir.train", *given, f"--seed={seed}", f"--output_dir={run}")


def check_recipes(files: Sequence[str]) -> None:
    """Raises a UserError for a gin file that is not there, and for a recipe in Python."""
    for file in files:
        if file.endswith(".py"):
            raise UserError(
                f"{file}: experiments set names of gin files, such as DATA and STEPS: give gin files, or"
                f" make one run with python -m jaxir.train --recipe={file}"
            )
        if find_recipe(file) is None:
            raise UserError(missing_recipe(file))


def _of_judge(directory: Path, name: str) -> Path:
    return directory / f"judge_{name}.json"


def stages_of(method: Method, steps: int, directory: Path) -> Iterator[tuple[Stage, int, Path, Path | None]]:
    """Yields each stage, its steps, its run directory, and the run it starts from (None: the pretrained)."""
    count, start = len(method.stages), None
    for place, stage in enumerate(method.stages):
        share = steps * (place + 1) // count - steps * place // count
        run = directory / ("model" if place == count - 1 else f"stage{place + 1}")
        yield stage, share, run, start
        start = run


def starting_from(run: Path, bindings: Sequence[str]) -> list[str]:
    """Returns bindings with a run's model as what is started from, in place of what they say of that."""
    others = [b for b in bindings if name_of(b) not in PRETRAINED]
    return [*others, f"MODEL={gin_text(str(run))}"]


def model_file(model: str) -> str:
    """Returns the gin file that a value of the axis of models means."""
    return model if model.endswith(".gin") else f"gin/models/{model}.gin"


def gin_text(text: str) -> str:
    """Returns a path as a value of a --gin flag: bare where the command line takes that for a string."""
    return text if "/" in text and re.fullmatch(r"[\w./:-]+", text) else repr(text)


def parse_folder(text: str) -> tuple[str, str]:
    """Returns name and directory of a value of the axis of data sets: [NAME=][beir:]DIR."""
    name, equals, directory = text.partition("=")
    name, directory = (name, directory) if equals else (Path(os.path.realpath(text)).name, text)
    if not directory.removeprefix("beir:"):
        raise UserError(f"{text!r} lacks a directory: a data set is written [NAME=]DIR")
    return name, directory.removeprefix("beir:")


def parse_judge(text: str) -> tuple[str, str]:
    """Returns the name of a judge and the dataset that it is: NAME=sts:PATH or NAME=senteval:DIR.

    Raises:
      UserError: it is written otherwise, or not there.
    """
    name, equals, dataset = text.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise UserError(f"a judge is NAME=sts:PATH or NAME=senteval:DIR, not {text!r}")
    kind, path = parse_dataset(dataset, *JUDGES)
    if not path.exists():
        raise UserError(f"{path}: no such {JUDGES[kind]}")
    return name, f"{kind}:{path}"


def check_bindings(bindings: Sequence[str], flags: Mapping[str, str]) -> None:
    """Raises a UserError for a binding of a name that a flag sets too: it would win in silence.

    Args:
      bindings: NAME=VALUE.
      flags: such names, and the flag for each.
    """
    for binding in bindings:
        if flag := flags.get(name := name_of(binding)):
            raise UserError(f"bindings cannot set {name}: give {flag} instead")


def _check_leaves(method: Method, bindings: Sequence[str]) -> None:
    """Raises a UserError for a binding of what makes a method the one that it is: the method's would win."""
    own = {name_of(binding): binding for stage in method.stages for binding in stage.bindings}
    for name in map(name_of, bindings):
        if name in own:
            raise UserError(
                f"bindings cannot set {name}: the objective {method.name} is that with {own[name]}"
            )


def name_of(binding: str) -> str:
    """Returns the NAME of NAME=VALUE, which may have spaces round it."""
    return binding.partition("=")[0].strip()


def check_axes(axes: GridSettings) -> None:
    """Raises a UserError for an axis that is empty or has a value twice, and for values that cannot be."""
    if not isinstance(axes.variants, list | tuple) or not all(isinstance(v, Variant) for v in axes.variants):
        raise UserError(f"variants must be a list, each @Variant(), not {axes.variants!r:.80}")
    named: Mapping[str, list[str]] = {
        "models": [Path(model).stem for model in axes.models],
        "sharing": list(axes.sharing),
        "objectives": [text.partition("=")[0] for text in axes.objectives],
        "variants": [variant.name for variant in axes.variants],
        "datasets": [parse_folder(text)[0] for text in axes.datasets],
        "seeds": [str(seed) for seed in axes.seeds],
        "untrained and runs": [text.partition("=")[0] for text in (*axes.untrained, *axes.runs)],
        "judges": [parse_judge(text)[0] for text in axes.judges],
    }
    for what, texts in (("untrained model is NAME=MODEL", axes.untrained), ("run is NAME=FILE", axes.runs)):
        if wrong := [text for text in texts if not re.fullmatch(r"\w+=.+", text)]:
            raise UserError(f"a row's {what}, not {wrong[0]!r}")
    if wrong := [seed for seed in named["seeds"] if not (seed.isascii() and seed.isdecimal())]:
        raise UserError(f"seeds must be whole numbers, not {wrong[0]!r}")
    for axis, names in named.items():
        if not names and axis not in ("untrained and runs", "judges"):
            raise UserError(f"{axis} must have at least one value")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{axis} has {twice[0]!r} twice")
        allowed = r"[\w.-]*" if axis == "datasets" else r"[\w.]*"  # a cell's directory joins names by -
        if wrong := [name for name in names if not re.fullmatch(allowed, name)]:
            raise UserError(f"a name in {axis} may have letters, digits, . and _, not {wrong[0]!r}")
    titled = {
        "objectives": [parse_method(text).title for text in axes.objectives],
        "variants": [variant.title for variant in axes.variants],
    }
    for axis, titles in titled.items():  # cells of one title would be one row, with the scores of the last
        if twice := sorted({title for title in titles if titles.count(title) > 1}):
            raise UserError(f"two {axis} are called {twice[0]!r} in tables: give each a title of its own")
    for sharing in axes.sharing:
        if sharing not in SHARING_TITLES:
            raise UserError(f"there is no sharing {sharing!r}; there are {', '.join(SHARING_TITLES)}")
    if axes.runs and len(axes.datasets) > 1:
        raise UserError("runs are over one data set, and the grid has several")
    for text in axes.runs:
        if not Path(file := text.partition("=")[2]).is_file():
            raise UserError(f"{file}: no such run file")
