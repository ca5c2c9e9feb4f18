"""Rounds of training on hard negatives, which each round mines with the previous round's model.

OUT/round0 trains on pairs without negatives, or with negatives of a given run. OUT/roundN encodes the corpus,
searches the training queries with the model of round N - 1, mines, and trains.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.evaluation.datasets import parse_dataset
from jaxir.experiments import cell_runner, inputs
from jaxir.experiments.experiment_settings import RoundSettings
from jaxir.experiments.grid_cells import (
    check_bindings,
    check_recipes,
    gin_text,
    name_of,
    starting_from,
    train_command,
)
from jaxir.storage.locks import locked

MINED = "gin/experiments/mined.gin"
LOG = "log.txt"
# Macros that rounds set in every training run, and the flag for each.
SET_BY_ROUNDS = {"STEPS": "--steps", "DATA": "--dataset", "SEED": "--seed", "MINED": "--first_run"}


class Step(NamedTuple):
    """One command of a round."""

    arguments: tuple[str, ...]  # arguments of `python`
    done: Path  # the file that exists once the command has finished


def steps_of(settings: RoundSettings, output: Path) -> Iterator[tuple[str, list[Step]]]:
    """Yields the name of each round and its commands."""
    check_bindings(settings.bindings, SET_BY_ROUNDS)
    check_recipes(settings.recipe)
    folder = _folder(settings)
    for split in ("train", settings.split):
        folder.qrels_path(split)
    for number in range(settings.rounds + 1):
        here, before = output / f"round{number}", output / f"round{number - 1}" / "model"
        steps: list[Step] = []
        run = settings.first_run
        if number:
            run = str(here / "train.trec")
            steps += _search(settings, folder, before, here)
        if run is not None:
            flags = {"run": run, "dataset": f"beir:{folder.directory}"} | settings.mining
            steps.append(_step("mine", here / "negatives/mining.json", flags, output=here / "negatives"))
        start = before if number and settings.start == "previous" else None
        steps.append(_train(settings, folder, here, start=start, mined=run is not None))
        flags = {"model": here / "model", "dataset": f"beir:{folder.directory}", "split": settings.split}
        result = here / "test.json"
        steps.append(_step("evaluate", result, flags, metrics=settings.metrics, output=result))
        yield here.name, steps


def run_rounds(settings: RoundSettings, output: Path, *, report: Callable[[str], None]) -> list[Path]:
    """Runs the unfinished commands, reports each one, and returns the test.json of each round."""
    planned = list(steps_of(settings, output))
    identity = tuple(
        shlex.join(["python", *step.arguments])
        for _, steps in steps_of(settings, Path("OUT"))
        for step in steps
    )
    inputs.check_split(_folder(settings), settings.split)
    read = _inputs(settings)
    with locked(output, f"another process works in {output}"):
        cell_runner.check_begun(output, identity, read)
        cell_runner.begin(output, identity, read)
        for name, steps in planned:
            for step in steps:
                if step.done.exists():
                    continue
                command, log = step.arguments[1], output / name / LOG
                report(f"{name}: {command}")
                log.parent.mkdir(exist_ok=True)
                try:
                    cell_runner.log_run(step.arguments, log)
                except cell_runner.CommandFailed as error:
                    raise UserError(f"{name}: {command} failed: {error} (see {log})") from error
    return [steps[-1].done for _, steps in planned]


def _folder(settings: RoundSettings) -> BeirFolder:
    return BeirFolder(parse_dataset(settings.dataset, "beir")[1])


def _inputs(settings: RoundSettings) -> dict[str, str]:
    """Returns what rounds read: name -> hash of the content."""
    folder = _folder(settings)
    read = inputs.of_gin_files(settings.recipe)
    read["the data set"] = inputs.of_collection(folder, "train", settings.split)
    read |= inputs.of_training_splits(folder, "the data set", settings.bindings)
    read |= inputs.of_named([*settings.bindings, *settings.mine])
    if settings.first_run is not None:
        read["first_run"] = inputs.of_file(settings.first_run)
    return read


def _search(settings: RoundSettings, folder: BeirFolder, model: Path, here: Path) -> list[Step]:
    embeddings, index, run = here / "embeddings", here / "index", here / "train.trec"
    encode = {"model": model, "input": folder.corpus_path, "output": embeddings}
    build = {"embeddings": embeddings, "backend": settings.backend, "output": index}
    search = {"index": index, "queries": folder.queries_path, "k": settings.mining["last"], "output": run}
    return [
        _step("encode", index / "index.json", encode),
        _step("index", index / "index.json", build),
        _step("search", run, search),
    ]


def _train(
    settings: RoundSettings, folder: BeirFolder, here: Path, *, start: Path | None, mined: bool
) -> Step:
    bindings = [f"STEPS={settings.steps}", f"DATA={gin_text(str(folder.directory))}", *settings.bindings]
    bindings = [b for b in bindings if mined or name_of(b) != "NEGATIVES"]
    if mined:
        bindings.append(f"MINED={gin_text(str(here / 'negatives' / 'train.jsonl'))}")
    if start is not None:
        bindings = starting_from(start, bindings)
    files, run = [*settings.recipe, *([MINED] if mined else [])], here / "model"
    return Step(train_command(files, bindings, settings.seed, run), run / "COMPLETE")


def _step(command: str, done: Path, flags: dict[str, object], **more: object) -> Step:
    return Step(("-m", f"jaxir.{command}", *(f"--{n}={v}" for n, v in (flags | more).items())), done)
