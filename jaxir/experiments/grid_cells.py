"""From the axes of a grid to its cells, and from a cell to the commands that train and test it."""

from __future__ import annotations

import dataclasses
import functools
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
from jaxir.experiments.methods import Method, Stage, parse_method

RESULT = "test.json"
# What a first stage starts from, in gin/models; a later one starts from the stage before.
PRETRAINED = ("MODEL", "INITIAL_CHECKPOINT_PATH", "TOKENIZER", "FROM_SCRATCH")
JUDGES = {"sts": "file or folder of rated pairs", "senteval": "folder of transfer tasks"}
# What a grid sets in the runs of a cell, and its own flag for that.
SET_BY_GRID = {"STEPS": "--steps", "SHARING": "--sharing", "DATA": "--datasets", "SEED": "--seeds"}
SHARING_TITLES = {"ade": "ADE", "ade_spl": "ADE-SPL", "sde": "SDE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to train that is compared with others: a value of an axis of one's own.

    Attributes:
      name: in directories.
      title: in tables.
      gin_files: added after the recipe's.
      bindings: gin bindings, NAME=VALUE.
    """

    name: str
    title: str
    gin_files: Sequence[str] = ()
    bindings: Sequence[str] = ()


PLAIN = Variant(name="", title="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """What is crossed with what.

    Attributes:
      models: gin files of gin/models without .gin, or paths of others.
      sharing: "ade", "ade_spl", "sde".
      objectives: names of `METHODS`, or NAME=FILE.gin+FILE.gin for stages of one's own.
      variants: `Variant`s.
      datasets: NAME=DIR or DIR, BEIR folders.
      seeds: of the order of the data, of dropout and of new parameters.
      untrained: NAME=MODEL, models that are tested as they are: rows of their own.
      judges: NAME=sts:PATH or NAME=senteval:DIR, what every model is tested on too.
      runs: NAME=FILE, run files over the one data set: rows of their own, which no judge sees.
    """

    models: Sequence[str]
    sharing: Sequence[str]
    objectives: Sequence[str]
    variants: Sequence[Variant]
    datasets: Sequence[str]
    seeds: Sequence[int]
    untrained: Sequence[str] = ()
    judges: Sequence[str] = ()
    runs: Sequence[str] = ()


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


def plan_cells(
    axes: Axes,
    *,
    recipe: Sequence[str],
    steps: int,
    bindings: Sequence[str],
    metrics: str,
    split: str,
    output_dir: Path,
) -> list[Cell]:
    """Lists the cells of a grid, seed by seed, so that a part of the grid is a grid of fewer seeds.

    Args:
      axes: what is crossed.
      recipe: gin files of every run.
      steps: optimizer steps of a cell, over all stages.
      bindings: gin bindings of every run.
      metrics: what to measure.
      split: the split to test on.
      output_dir: the grid's directory.

    Raises:
      UserError: an axis without values or with one twice, an unknown value, a file or data set that is not
        there, fewer steps than stages, or a binding of what the grid itself sets.
    """
    check_axes(axes)
    methods = {method.name: method for method in map(parse_method, axes.objectives)}
    for given in (bindings, *(variant.bindings for variant in axes.variants)):
        check_bindings(given, SET_BY_GRID)
        for method in methods.values():
            _check_leaves(method, given)
    folders = dict(map(parse_folder, axes.datasets))
    judges = dict(map(parse_judge, axes.judges))
    for folder in folders.values():
        inputs.check_split(BeirFolder(folder), split)
    data = {
        name: {f"data set {name}": inputs.of_collection(BeirFolder(folder), "train", split)}
        for name, folder in folders.items()
    }
    judged_by = {name: inputs.of_file(spec.partition(":")[2]) for name, spec in judges.items()}
    stages = max(len(method.stages) for method in methods.values())
    if steps < stages:
        raise UserError(f"steps is {steps}, but there must be at least one for each of {stages} stages")
    files = [*recipe, *(stage.gin_file for method in methods.values() for stage in method.stages)]
    files += [file for variant in axes.variants for file in variant.gin_files]
    for file in [*files, *map(model_file, axes.models)]:
        if find_recipe(file) is None:
            raise UserError(missing_recipe(file))

    def trained(seed: int, dataset: str, model: str, sharing: str, variant: Variant, method: Method) -> Cell:
        parts = [dataset, Path(model).stem, sharing, method.name, variant.name, f"seed{seed}"]
        row = Row(model=Path(model).stem, sharing=sharing, objective=method.title, variant=variant.title)

        def training(directory: Path, folder: str) -> tuple[tuple[Path, tuple[str, ...]], ...]:
            shared = [f"SHARING={sharing}", f"DATA={gin_text(folder)}", *bindings, *variant.bindings]
            names = {name_of(binding) for binding in shared}
            commands = []
            for stage, share, run, start in stages_of(method, steps, directory):
                given = [f"STEPS={share}", *shared, *stage.bindings]
                given += [default for default in stage.defaults if name_of(default) not in names]
                if start is not None:
                    given = starting_from(start, given)
                files = [*recipe, model_file(model), stage.gin_file, *variant.gin_files]
                arguments = [f"--gin_file={file}" for file in files]
                arguments += [f"--gin.{binding}" for binding in given]
                arguments += [f"--seed={seed}", f"--output_dir={run}"]
                commands.append((run, ("-m", "jaxir.train", *arguments)))
            return tuple(commands)

        own = [*recipe, *(stage.gin_file for stage in method.stages), model_file(model), *variant.gin_files]
        folder, given = BeirFolder(folders[dataset]), [*bindings, *variant.bindings]
        splits = inputs.of_training_splits(folder, f"data set {dataset}", given)
        read = data[dataset] | splits | inputs.of_gin_files(own)
        return cell(row, dataset, seed, parts, training, None, read | inputs.of_named(given))

    def cell(
        row: Row,
        dataset: str,
        seed: int,
        parts: Sequence[str],
        training: Callable[[Path, str], tuple[tuple[Path, tuple[str, ...]], ...]],
        model: str | None,
        read: Mapping[str, str],
    ) -> Cell:
        def commands(directory: Path, folder: str) -> Commands:
            tested = ("-m", "jaxir.evaluate", f"--model={model or directory / 'model'}")
            arguments = (f"--dataset=beir:{folder}", f"--split={split}", f"--metrics={metrics}")
            judging = {
                name: (*tested, f"--dataset={spec}", f"--output={_of_judge(directory, name)}")
                for name, spec in judges.items()
            }
            return Commands(
                training=training(directory, folder),
                testing=(*tested, *arguments, f"--output={directory / RESULT}"),
                judging=judging,
            )

        directory = output_dir / "cells" / "-".join(filter(None, parts))
        return Cell(
            row=row,
            dataset=dataset,
            seed=seed,
            directory=directory,
            commands=commands(directory, folders[dataset]),
            identity=commands(Path("CELL"), "DATA")._replace(judging={}).lines(),
            inputs=read,
            judged_by=judged_by,
        )

    crossed = itertools.product(
        axes.seeds, folders, axes.models, axes.sharing, axes.variants, methods.values()
    )
    cells = [trained(*point) for point in crossed]
    for dataset, text in itertools.product(folders, axes.untrained):
        name, _, model = text.partition("=")
        row = Row(model="", sharing="", objective=name, variant="")
        content = inputs.of_model(model)
        read = data[dataset] | ({} if content is None else {f"model {name}": content})
        cells.append(cell(row, dataset, axes.seeds[0], [dataset, name], lambda *_: (), model, read))
    for dataset, text in itertools.product(folders, axes.runs):
        name, _, file = text.partition("=")
        directory = output_dir / "cells" / f"{dataset}-{name}"
        scoring = functools.partial(_scoring, file, BeirFolder(folders[dataset]).qrels_path(split), metrics)
        cells.append(
            Cell(
                row=Row(model="", sharing="", objective=name, variant=""),
                dataset=dataset,
                seed=axes.seeds[0],
                directory=directory,
                commands=scoring(directory),
                identity=scoring(Path("CELL")).lines(),
                inputs=data[dataset] | {f"run {name}": inputs.of_file(file)},
            )
        )
    return cells


def _scoring(run: str, qrels: Path, metrics: str, directory: Path) -> Commands:
    arguments = (f"--run={run}", f"--qrels={qrels}", f"--metrics={metrics}", f"--output={directory / RESULT}")
    return Commands(training=(), testing=("-m", "jaxir.evaluate", *arguments))


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


def check_axes(axes: Axes) -> None:
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
    if wrong := [text for text in axes.untrained if not re.fullmatch(r"\w+=.+", text)]:
        raise UserError(f"an untrained model is NAME=MODEL, not {wrong[0]!r}")
    if wrong := [text for text in axes.runs if not re.fullmatch(r"\w+=.+", text)]:
        raise UserError(f"a run is NAME=FILE, not {wrong[0]!r}")
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
