"""Rounds of training on hard negatives, each mined with the model of the round before.

OUT/round0 trains on the pairs as they are (or on negatives of a run that is given, BM25's say). OUT/roundN
encodes the corpus and searches the training queries with the model of round N - 1, mines, and trains.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from jaxir.core.errors import UserError
from jaxir.core.installation import find_recipe, missing_recipe
from jaxir.core.values import Count, Natural, Seed, checked
from jaxir.data.formats.sources import BeirFolder
from jaxir.experiments import cell_runner, inputs
from jaxir.experiments.grid_cells import check_bindings, gin_text, name_of, starting_from
from jaxir.storage.locks import locked

MINED = "gin/experiments/mined.gin"
LOG = "log.txt"
# What rounds set in every training run, and their own flag for that.
SET_BY_ROUNDS = {"STEPS": "--steps", "DATA": "--dataset", "SEED": "--seed", "MINED": "--first_run"}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class RoundSettings:
    """What every round does.

    Attributes:
      recipe: gin files of every training run: model, objective, run.
      dataset: the BEIR folder; its split `train` is trained on.
      rounds: rounds with mined negatives.
      steps: optimizer steps of each round.
      start: what a round starts from: the `previous` round's model (ANCE), or the `pretrained` one.
      first_run: a run over the training queries to mine round 0's negatives from; None for none.
      mining: flags of jaxir.mine.
      backend: the engine that searches.
      depth: answers of a query that are searched for.
      bindings: gin bindings of every training run.
      metrics: what to measure after each round.
      split: on which split.
      seed: of training.
    """

    recipe: Sequence[str]
    dataset: Path
    rounds: Natural
    steps: Count
    start: Literal["previous", "pretrained"]
    first_run: str | None
    mining: Sequence[str]
    backend: Literal["scann", "exact"]
    depth: Count
    bindings: Sequence[str]
    metrics: str
    split: str
    seed: Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a round.

    Attributes:
      arguments: after `python`.
      done: the file that is there once it is finished.
      results: files that later commands read, and that nothing else would show to have changed.
    """

    arguments: tuple[str, ...]
    done: Path
    results: tuple[Path, ...] = ()


def steps_of(settings: RoundSettings, output: Path) -> Iterator[tuple[str, list[Step]]]:
    """Yields the name of each round and its commands, in order.

    Raises:
      UserError: a gin file or split that is not there, or a binding of what the command itself sets.
    """
    check_bindings(settings.bindings, SET_BY_ROUNDS)
    for file in settings.recipe:
        if find_recipe(file) is None:
            raise UserError(missing_recipe(file))
    folder = BeirFolder(settings.dataset)
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
            mining = [f"--run={run}", f"--dataset=beir:{settings.dataset}", *settings.mining]
            mined, report = here / "negatives/train.jsonl", here / "negatives/mining.json"
            steps.append(_step("mine", [*mining, f"--output={mined.parent}"], report, mined, report))
        start = before if number and settings.start == "previous" else None
        steps.append(_train(settings, here, start=start, mined=run is not None))
        scoring = [
            f"--model={here / 'model'}",
            f"--dataset=beir:{settings.dataset}",
            f"--split={settings.split}",
        ]
        result = here / "test.json"
        steps.append(
            _step(
                "evaluate", [*scoring, f"--metrics={settings.metrics}", f"--output={result}"], result, result
            )
        )
        yield here.name, steps


def run_rounds(settings: RoundSettings, output: Path, *, say: Callable[[str], None]) -> list[Path]:
    """Runs what is not finished yet and returns the scores of each round, test.json files.

    Args:
      settings: what to do.
      output: directory of all rounds, new or to be taken up again.
      say: told of each command before it runs.

    Raises:
      UserError: the directory was begun with other settings, another process works in it, a result of an
        earlier call has changed since, or a command failed.
      Interrupted: on SIGINT or SIGTERM, once the command at work has saved what it had.
    """
    planned = list(steps_of(settings, output))
    identity = tuple(
        shlex.join(["python", *step.arguments])
        for _, steps in steps_of(settings, Path("OUT"))
        for step in steps
    )
    read = inputs.of_gin_files(settings.recipe)
    inputs.check_split(BeirFolder(settings.dataset), settings.split)
    folder = BeirFolder(settings.dataset)
    read["the data set"] = inputs.of_collection(folder, "train", settings.split)
    read |= inputs.of_training_splits(folder, "the data set", settings.bindings)
    read |= inputs.of_named(settings.bindings)
    if settings.first_run is not None:
        read["first_run"] = inputs.of_file(settings.first_run)
    judges = [flag.removeprefix("--") for flag in settings.mining if flag.startswith("--cross_encoder=")]
    read |= inputs.of_named(judges)
    with locked(output, f"another process works in {output}"):
        cell_runner.check_begun(output, identity, read)
        for name, steps in planned:
            cell_runner.check_results(output / name, _results(output / name, steps))
        cell_runner.begin(output, identity, read)
        for name, steps in planned:
            for step in steps:
                if step.done.exists():
                    continue
                command, log = step.arguments[1], output / name / LOG
                say(f"{name}: {command}")
                log.parent.mkdir(exist_ok=True)
                try:
                    for _ in cell_runner.running(step.arguments, log):
                        pass
                except cell_runner.CommandFailed as error:
                    raise UserError(f"{name}: {command} failed: {error} (see {log})") from error
                cell_runner.note_results(output / name, _results(output / name, steps))
    return [steps[-1].done for _, steps in planned]


def _results(here: Path, steps: Sequence[Step]) -> list[str]:
    made = (path for step in steps if step.done.exists() for path in step.results)
    return [str(path.relative_to(here)) for path in made]


def _search(settings: RoundSettings, folder: BeirFolder, model: Path, here: Path) -> list[Step]:
    embeddings, index, run = here / "embeddings", here / "index", here / "train.trec"
    encode = [f"--model={model}", f"--input={folder.corpus_path}", f"--output={embeddings}"]
    build = [f"--embeddings={embeddings}", f"--backend={settings.backend}", f"--output={index}"]
    search = [
        f"--index={index}",
        f"--queries={folder.queries_path}",
        f"--k={settings.depth}",
        f"--output={run}",
    ]
    return [
        _step("encode", encode, index / "index.json"),
        _step("index", build, index / "index.json"),
        _step("search", search, run, run),
    ]


def _train(settings: RoundSettings, here: Path, *, start: Path | None, mined: bool) -> Step:
    files = [*settings.recipe, *([MINED] if mined else [])]
    bindings = [f"STEPS={settings.steps}", f"DATA={gin_text(str(settings.dataset))}", *settings.bindings]
    bindings = [b for b in bindings if mined or name_of(b) != "NEGATIVES"]
    if mined:
        bindings.append(f"MINED={gin_text(str(here / 'negatives' / 'train.jsonl'))}")
    if start is not None:
        bindings = starting_from(start, bindings)
    run = here / "model"
    arguments = [*(f"--gin_file={file}" for file in files), *(f"--gin.{binding}" for binding in bindings)]
    arguments += [f"--seed={settings.seed}", f"--output_dir={run}"]
    return _step("train", arguments, run / "COMPLETE", run / "run.json")  # another one for each run


def _step(command: str, arguments: Sequence[str], done: Path, *results: Path) -> Step:
    return Step(arguments=("-m", f"jaxir.{command}", *arguments), done=done, results=results)
