import ast
import collections
import functools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import gin
import pytest

from jaxir.cli import gin_config
from jaxir.core.values import hints_of, simple
from jaxir.train import train
from jaxir.training.run.recipe import Recipe

DOCS = Path(__file__).resolve().parent.parent / "docs"
NEEDED = ["TEXT=texts.txt", "MODEL=hf:google-bert/bert-base-uncased"]
# The settings, objective and bindings to which the rows below a page's heading are added.
BASES = {
    ("reference/tables_without_labels.md", "## Wang 2022"): ("wang2022", None, ["DEV_TEXT=held_out.txt"]),
    ("reference/tables_without_labels.md", "## Chuang 2024"): ("chuang2024", None, ["STS=dev.tsv"]),
    ("reference/tables_without_labels.md", "## DiffCSE's rows"): ("chuang2024", ["diffcse"], ["STS=dev.tsv"]),
    ("reference/tables_without_labels.md", "## CPDAE's rows"): ("ma2022", ["cpdae"], ["PASSAGE_LENGTH=128"]),
}


class Row(NamedTuple):
    """A run of a table: where it is, and its settings, objectives, flags and required bindings."""

    where: str
    settings: str
    objectives: list[str]
    flags: list[str]
    needed: list[str]


def rows() -> list[Row]:
    found = []
    for (page, heading), (settings, own, needed) in BASES.items():
        lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
        start = next(n for n, line in enumerate(lines) if line.startswith(heading))
        end = next((n for n in range(start + 1, len(lines)) if lines[n].startswith("## ")), len(lines))
        for number in range(start, end):
            cells = [cell.strip() for cell in lines[number].split("|")[1:-1]]
            if len(cells) < 3 or cells[0] == "table" or set(cells[0]) == {"-"}:
                continue
            objectives = own or re.findall(r"`(\w+)`", cells[-2])
            where = f"{page}:{number + 1}"
            found += [Row(where, settings, objectives, flags, needed) for flags in variants(cells[-1])]
    return found


def variants(cell: str) -> list[list[str]]:
    """Returns the flags of each run: "`--a=1 --b=2`, `3`" are two runs, the second with b = 3."""
    found = [[]] if cell.startswith("none") else []
    for flags, others in re.findall(r"`(--[^`]+)`((?:, `[^`]+`)*)", cell):
        first = shlex.split(flags.replace('"', '\\"') if "'" not in flags else flags)
        name = first[-1].partition("=")[0]
        found.append(first)
        found += [[*first[:-1], f"{name}={other}"] for other in re.findall("`([^`]+)`", others)]
    return found


ROWS = rows()


def bound(row: Row, flags: list[str]) -> tuple[Recipe, str]:
    """Returns the recipe of a run, and its configuration."""
    files = [f.partition("=")[2] for f in flags if f.startswith("--gin_file=")]
    objectives = files or [f"gin/objectives/{name}.gin" for name in row.objectives]
    typed = [f.removeprefix("--").partition("=") for f in flags if not f.startswith("--gin_file=")]
    own = [name for name, hint in hints_of(Recipe).items() if simple(hint) is not None]
    bindings = [f"{name.upper()}={value}" for name, _, value in typed if name not in own]
    given = {binding.partition("=")[0] for binding in bindings}
    needed = [binding for binding in (*NEEDED, *row.needed) if binding.partition("=")[0] not in given]
    only = {name: ast.literal_eval(value) for name, _, value in typed if name in own}
    pieces = ["gin/unsupervised.gin", *objectives, f"gin/experiments/{row.settings}.gin"]
    gin_config.bind(train, pieces, [*needed, *bindings], {**only, "output_dir": "run"})
    try:
        return Recipe(**gin.get_bindings(train)), gin_config.operative_config()
    finally:
        gin.clear_config()


@functools.cache
def base_of(settings: str, *objectives: str) -> str:
    """Returns the configuration that the rows with these settings are added to."""
    row = next(r for r in ROWS if (r.settings, *r.objectives) == (settings, *objectives))
    return bound(row, [])[1]


def test_pages_list_every_trained_row_of_the_papers():
    own = collections.Counter((r.settings, *r.objectives) for r in ROWS)
    assert len(ROWS) >= 90 and own["chuang2024", "diffcse"] >= 46 and own["ma2022", "cpdae"] >= 9, own


@pytest.mark.parametrize("row", ROWS, ids=[f"{r.where} {' '.join(r.flags)}" for r in ROWS])
def test_row_binds(row):
    recipe, config = bound(row, row.flags)
    without = base_of(row.settings, *row.objectives)
    assert recipe.batch_size >= 32 and recipe.objective.features is not None
    same = config == without
    assert same == (not row.flags) or row.flags[-1] in DEFAULTS, row.flags


def test_wangs_short_runs_end_within_the_warm_up():
    """Wang (2022), table 5.11: 195 steps of 512 texts, with a warm-up of 910 steps."""
    row = Row("", "wang2022", ["simcse"], [], ["DEV_TEXT=held_out.txt"])
    recipe, _ = bound(row, ["--batch_size=512"])
    settled = recipe.settled(100_000)
    assert settled.steps == 196
    last = float(settled.optimizer.build(settled.steps).schedule(195))
    assert last == pytest.approx(3e-5 * 196 / 910)


# Values of a sweep that equal the base's settings.
DEFAULTS = {"--batch_size=64", "--masking_ratio=0.3", "--lambda=0.005"}
