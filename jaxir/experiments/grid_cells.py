"""Expands the axes of a grid to cells, and a cell to the commands that train and test it."""

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
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.collection_names import folder_of
from jaxir.evaluation.datasets import parse_dataset
from jaxir.experiments import inputs
from jaxir.experiments.experiment_settings import GridSettings, Variant
from jaxir.experiments.methods import Method, Stage, parse_method

RESULT = "test.json"
# Macros of gin/models that set what the first stage starts from. A later stage starts from the one before.
PRETRAINED = ("MODEL", "INITIAL_CHECKPOINT_PATH", "TOKENIZER", "FROM_SCRATCH")
JUDGES = {"sts": "file or folder of rated pairs", "senteval": "folder of transfer tasks"}
# Macros that a grid sets in the runs of its cells, and the grid's flag for each.
SET_BY_GRID = {"STEPS": "--steps", "SHARING": "--sharing", "DATA": "--datasets", "SEED": "--seeds"}
SHARING_TITLES = {"ade": "ADE", "ade_spl": "ADE-SPL", "sde": "SDE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table of results: everything that defines a cell, except the data set and the seed."""

    model: str = ""
    sharing: str = ""
    objective: str
    variant: str = ""


class Commands(NamedTuple):
    """The commands of a cell, without `python`."""

    training: tuple[tuple[Path, tuple[str, ...]], ...]  # run directory and command of each stage
    testing: tuple[str, ...]  # the command that writes the scores on the data set
    judging: Mapping[str, tuple[str, ...]] = {}  # the command of each judge, by name

    def lines(self) -> tuple[str, ...]:
        """Returns the commands as lines for a shell."""
        everything = [*(arguments for _, arguments in self.training), self.testing, *self.judging.values()]
        return tuple(shlex.join(["python", *arguments]) for arguments in everything)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One model to train and to test."""

    row: Row
    dataset: str  # name of the cell's data set
    seed: int
    directory: Path
    commands: Commands
    # The cell's commands, without judges and without the directories of grid and data.
    identity: tuple[str, ...]
    # The files and models that these commands read: name -> hash of the content.
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    judged_by: Mapping[str, str] = dataclasses.field(default_factory=dict)  # judge -> hash of its data

    @property
    def result(self) -> Path:
        """The scores on the test split."""
        return self.directory / RESULT

    @property
    def log(self) -> Path:
        """The file with the output of the cell's commands."""
        return self.directory / "log.txt"

    @property
    def judged(self) -> dict[str, Path]:
        """The output file of each judge."""
        return {name: _of_judge(self.directory, name) for name in self.commands.judging}

    @property
    def finished(self) -> bool:
        """Whether all results exist."""
        return self.result.exists() and all(path.exists() for path in self.judged.values())

    @property
    def name(self) -> str:
        return self.directory.name


def plan_cells(grid: GridSettings, output_dir: Path) -> list[Cell]:
    """Returns the cells of a grid, ordered by seed, so that an unfinished grid is a grid of fewer seeds."""
    check_axes(grid)
    maker = _Maker(grid, output_dir)
    axes = (grid.seeds, maker.folders, grid.models, grid.sharing, grid.variants, maker.methods)
    return [
        *itertools.starmap(maker.trained, itertools.product(*axes)),
        *itertools.starmap(maker.untrained, itertools.product(maker.folders, grid.untrained)),
        *itertools.starmap(maker.scored, itertools.product(maker.folders, grid.runs)),
    ]


class _Maker:
    """Makes the cells of a grid."""

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
            raise UserError(f"steps is {grid.steps}: give at least {stages}, one for each stage")
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
        """Returns the cell of a model to train and test."""
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
        """Returns the cell of NAME=MODEL, a model to test without training."""
        name, _, model = text.partition("=")
        content = inputs.of_model(model)
        read = {} if content is None else {f"model {name}": content}

        def commands(directory: Path, folder: str) -> Commands:
            return self._tests(directory, folder, model)

        return self._cell(Row(objective=name), dataset, f"{dataset}-{name}", commands, read)

    def scored(self, dataset: str, text: str) -> Cell:
        """Returns the cell of NAME=FILE, a run file."""
        name, _, file = text.partition("=")
        qrels = self.folders[dataset].qrels_path(self.grid.split)

        def commands(directory: Path, _: str) -> Commands:
            arguments = [f"--run={file}", f"--qrels={qrels}", f"--metrics={self.grid.metrics}"]
            return Commands((), ("-m", "jaxir.evaluate", *arguments, f"--output={directory / RESULT}"))

        read = {f"run {name}": inputs.of_file(file)}
        return self._cell(Row(objective=name), dataset, f"{dataset}-{name}", commands, read)

    def _tests(self, directory: Path, folder: str, model: str) -> Commands:
        tested = ("-m", "jaxir.evaluate", f"--model={model}")
        flags = (f"--dataset=beir:{folder}", f"--split={self.grid.split}", f"--metrics={self.grid.metrics}")
        judging = {
            name: (*tested, f"--dataset={spec}", f"--output={_of_judge(directory, name)}")
            for name, spec in self.judges.items()
        }
        return Commands((), (*tested, *flags, f"--output={directory / RESULT}"), judging)

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


def train_command(files: Sequence[str], bindings: Sequence[str], seed: int, run: Path) -> tuple[str, ...]:
    """Returns the arguments of `python` for a training run."""
    given = [*(f"--gin_file={file}" for file in files), *(f"--gin.{binding}" for binding in bindings)]
    return ("-m", "jaxir.train", *given, f"--seed={seed}", f"--output_dir={run}")


def check_recipes(files: Sequence[str]) -> None:
    """Refuses missing gin files, and recipes in Python."""
    for file in files:
        if file.endswith(".py"):
            raise UserError(
                f"{file}: experiments need gin files, because they set macros such as DATA and STEPS; train a"
                f" single run with python -m jaxir.train --recipe={file}"
            )
        if find_recipe(file) is None:
            raise UserError(missing_recipe(file))


def _of_judge(directory: Path, name: str) -> Path:
    return directory / f"judge_{name}.json"


def stages_of(method: Method, steps: int, directory: Path) -> Iterator[tuple[Stage, int, Path, Path | None]]:
    """Yields (stage, its steps, its run directory, the run that it starts from; None: a pretrained model)."""
    count, start = len(method.stages), None
    for place, stage in enumerate(method.stages):
        share = steps * (place + 1) // count - steps * place // count
        run = directory / ("model" if place == count - 1 else f"stage{place + 1}")
        yield stage, share, run, start
        start = run


def starting_from(run: Path, bindings: Sequence[str]) -> list[str]:
    """Returns bindings that start from a run's model instead of the model that `bindings` name."""
    others = [b for b in bindings if name_of(b) not in PRETRAINED]
    return [*others, f"MODEL={gin_text(str(run))}"]


def model_file(model: str) -> str:
    """Returns the gin file of a value of the models axis."""
    return model if model.endswith(".gin") else f"gin/models/{model}.gin"


def gin_text(text: str) -> str:
    """Returns a path as the value of a --gin flag, quoted only if necessary."""
    return text if "/" in text and re.fullmatch(r"[\w./:-]+", text) else repr(text)


def parse_folder(text: str) -> tuple[str, str]:
    """Returns name and directory of [NAME=][beir:]DIR, [NAME=]hf:NAME or [NAME=]ir_datasets:ID."""
    name, equals, directory = text.partition("=")
    name, directory = (name, directory) if equals else (Path(os.path.realpath(text)).name, text)
    if not directory.removeprefix("beir:"):
        raise UserError(f"{text!r} lacks a directory: write a data set as [NAME=]DIR")
    return name, str(folder_of(directory))


def parse_judge(text: str) -> tuple[str, str]:
    """Returns name and dataset of NAME=sts:PATH or NAME=senteval:DIR."""
    name, equals, dataset = text.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise UserError(f"a judge must be NAME=sts:PATH or NAME=senteval:DIR, not {text!r}")
    kind, path = parse_dataset(dataset, *JUDGES)
    if not path.exists():
        raise UserError(f"{path}: no such {JUDGES[kind]}; correct the path of the judge")
    return name, f"{kind}:{path}"


def check_bindings(bindings: Sequence[str], flags: Mapping[str, str]) -> None:
    """Refuses bindings of names that are set by flags; `flags` maps each name to its flag."""
    for binding in bindings:
        if flag := flags.get(name := name_of(binding)):
            raise UserError(f"bindings cannot set {name}: give {flag} instead")


def _check_leaves(method: Method, bindings: Sequence[str]) -> None:
    """Refuses bindings of names that the method itself binds."""
    own = {name_of(binding): binding for stage in method.stages for binding in stage.bindings}
    for name in map(name_of, bindings):
        if name in own:
            raise UserError(f"bindings cannot set {name}: the objective {method.name} sets {own[name]}")


def name_of(binding: str) -> str:
    """Returns the NAME of NAME=VALUE."""
    return binding.partition("=")[0].strip()


def check_axes(axes: GridSettings) -> None:
    """Refuses axes that are empty or have a value twice, and invalid values."""
    if not isinstance(axes.variants, list | tuple) or not all(isinstance(v, Variant) for v in axes.variants):
        raise UserError(f"variants must be a list of @Variant(), not {axes.variants!r:.80}")
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
    for what, texts in (
        ("untrained must be NAME=MODEL", axes.untrained),
        ("runs must be NAME=FILE", axes.runs),
    ):
        if wrong := [text for text in texts if not re.fullmatch(r"\w+=.+", text)]:
            raise UserError(f"{what}, not {wrong[0]!r}")
    if wrong := [seed for seed in named["seeds"] if not (seed.isascii() and seed.isdecimal())]:
        raise UserError(f"seeds must be whole numbers, not {wrong[0]!r}")
    for axis, names in named.items():
        if not names and axis not in ("untrained and runs", "judges"):
            raise UserError(f"{axis} must have at least one value")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{axis} has {twice[0]!r} twice: give it once")
        # Only data sets' names may have "-", which joins the names in a cell's directory.
        allowed = r"[\w.-]*" if axis == "datasets" else r"[\w.]*"
        if wrong := [name for name in names if not re.fullmatch(allowed, name)]:
            raise UserError(f"a name in {axis} may have letters, digits, . and _, not {wrong[0]!r}")
    titled = {
        "objectives": [parse_method(text).title for text in axes.objectives],
        "variants": [variant.title for variant in axes.variants],
    }
    for axis, titles in titled.items():  # cells with equal titles would share a row
        if twice := sorted({title for title in titles if titles.count(title) > 1}):
            raise UserError(f"two {axis} have the title {twice[0]!r} in tables: give each its own title")
    for sharing in axes.sharing:
        if sharing not in SHARING_TITLES:
            raise UserError(f"unknown sharing {sharing!r}; give one of {', '.join(SHARING_TITLES)}")
    if axes.runs and len(axes.datasets) > 1:
        raise UserError("--runs needs a grid with one data set: give one of --datasets, or no --runs")
    for text in axes.runs:
        if not Path(file := text.partition("=")[2]).is_file():
            raise UserError(f"{file}: no such run file")
