import dataclasses
import functools
import inspect
import json
import shlex
import types
from collections.abc import Iterator
from pathlib import Path

import gin

from jaxir.cli import gin_config
from jaxir.experiments import mining_rounds as rounds_lib
from jaxir.experiments.experiment_settings import RoundSettings
from jaxir.grid import grid
from jaxir.rounds import rounds
from jaxir.runtime.partitioning import MeshConfig
from jaxir.train import train

GOLDEN = Path(__file__).parent / "bindings.json"
GRIDS = ("table1", "minilm_grid", "minilm_duplicates_grid")
RECIPES = ("quickstart", "samtone_base", "samtone_large", "samtone_xxl")
PAPERS = {  # recipes of several files, and the bindings that they require
    "he2022": ("curriculum experiments/he2022", "DATA=corpus MINED=pairs.jsonl EXPANSIONS=queries"),
    "chuang2024": ("unsupervised objectives/diffcse experiments/chuang2024", "TEXT=x STS=y GENERATOR=hf:z"),
    "reader": ("reader evaluators/reading", "DATA=corpus RUN=run.trec ANSWERS=a.jsonl DEV_RUN=dev.trec"),
}
# Defaults of `train`, for settings that no file binds.
DEFAULTS = {name: p.default for name, p in inspect.signature(train).parameters.items()}
DEFAULTS["mesh"] = MeshConfig()
OF_DEV = ("eval_every", "dev_metric", "dev_distractors")


def settings_of(words: list[str]) -> dict[str, object]:
    """Returns the settings of a training command by dotted name; objects are expanded."""
    files = [w.removeprefix("--gin_file=") for w in words if w.startswith("--gin_file=")]
    bindings = [w.removeprefix("--gin.") for w in words if w.startswith("--gin.")]
    gin_config.bind(train, files, bindings, {"output_dir": "run"})
    found: dict[str, object] = {}
    for name, value in (DEFAULTS | gin.get_bindings(train)).items():
        if value is not inspect.Parameter.empty:
            found |= dict(flat(name, DEFAULTS[name] if value is None else value))
    return (
        found
        if {"dev", "evaluators.0"} & found.keys()
        else {k: v for k, v in found.items() if k not in OF_DEV}
    )


def flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, functools.partial | types.FunctionType):
        yield name, value.__name__
        for key, bound in gin.get_bindings(value).items():
            yield from flat(f"{name}.{key}", bound)
    elif dataclasses.is_dataclass(value):
        yield name, type(value).__name__
        for field in dataclasses.fields(value):
            yield from flat(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, list | tuple) and any(map(dataclasses.is_dataclass, value)):
        for number, item in enumerate(value):
            yield from flat(f"{name}.{number}", item)
    elif value is not None:
        yield name, value


def commands(tmp_path: Path, folder: Path, capsys) -> Iterator[tuple[str, str, list[str]]]:
    """Yields the experiment, the run's name and the command of each training run with seed 0."""
    for name in GRIDS:
        flags = {"output_dir": "GRID", "datasets": [f"data={folder}"], "seeds": ["0"], "dry_run": True}
        bound, _ = gin_config.bind(grid, [f"gin/experiments/{name}.gin"], [], flags)
        capsys.readouterr()
        assert bound() == 0
        for line in capsys.readouterr().out.replace(str(folder), "DATA").splitlines():
            words = shlex.split(line)
            if "jaxir.train" in words:
                run = next(w for w in words if w.startswith("--output_dir="))
                yield name, run.removeprefix("--output_dir=GRID/cells/"), words
    gin_config.bind(rounds, ["gin/experiments/minilm_rounds.gin"], [], {})
    bound = gin.get_bindings(rounds)
    settings = RoundSettings(**bound, dataset=f"beir:{folder}")
    for name, steps in rounds_lib.steps_of(settings, Path("OUT")):
        for step in steps:
            if "jaxir.train" in step.arguments:
                yield "minilm_rounds", name, [w.replace(str(folder), "DATA") for w in step.arguments]
    for name in RECIPES:
        yield "recipes", name, [f"--gin_file=gin/{name}.gin", "--gin.DATA=DATA"]
    for name, (pieces, bindings) in PAPERS.items():
        files = [f"--gin_file=gin/{piece}.gin" for piece in pieces.split()]
        yield "papers", name, [*files, *(f"--gin.{binding}" for binding in bindings.split())]


def measured(tmp_path: Path, folder: Path, capsys) -> dict[str, dict[str, dict[str, object]]]:
    """Returns the settings of each run; those that all runs of an experiment share are under `all`."""
    found: dict[str, dict[str, dict[str, object]]] = {}
    for experiment, run, words in commands(tmp_path, folder, capsys):
        found.setdefault(experiment, {})[run] = settings_of(words)
    for runs in found.values():
        first, *others = runs.values()
        common = {k: v for k, v in first.items() if all(o.get(k) == v and k in o for o in others)}
        for run, settings in runs.items():
            runs[run] = {k: v for k, v in settings.items() if k not in common}
        runs["all"] = common
    return json.loads(json.dumps(found))


def test_shipped_experiments_keep_their_settings(tmp_path, folder, capsys):
    assert measured(tmp_path, folder, capsys) == json.loads(GOLDEN.read_text())
