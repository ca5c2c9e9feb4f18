import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.experiments import table
from jaxir.experiments.grid_cells import Cell, Commands, Row

VALUES = {  # (objective, seed) -> P@1 of three queries
    ("Standard", 0): [0, 0, 1],
    ("Standard", 1): [0, 1, 1],
    ("SamToNe", 0): [1, 0, 1],
    ("SamToNe", 1): [1, 1, 1],
}


def cell(directory: Path, objective: str, seed: int, values, *, dataset="data", variant="") -> Cell:
    made = directory / f"{dataset}-{objective}-{variant}-{seed}"
    made.mkdir()
    if values is not None:
        of_queries = {f"q{i}": float(v) for i, v in enumerate(values)}
        scores = {"metrics": {"P@1": float(np.mean(values))}, "per_query": {"P@1": of_queries}}
        (made / "test.json").write_text(json.dumps(scores))
    return Cell(
        row=Row(model="tiny", sharing="ade_spl", objective=objective, variant=variant),
        dataset=dataset,
        seed=seed,
        directory=made,
        commands=Commands(training=(), testing=()),
        identity=(),
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"metrics": {"RR": "x"}, "per_query": {"RR": {"q": 1}}}',
        '{"metrics": {"RR": 1}, "per_query": {}}',
        '{"metrics": {"RR": 1}, "per_query": {"RR": {"q": NaN}}}',
    ],
)
def test_damaged_scores_name_their_file(cells, content):
    path = cells[1].directory / "test.json"
    path.write_text(content)
    for reader in (lambda: table.collect(cells), lambda: table.rounds_table([path])):
        with pytest.raises(UserError) as raised:
            reader()
        assert str(raised.value).startswith(str(path))


@pytest.fixture
def cells(tmp_path):
    return [cell(tmp_path, objective, seed, values) for (objective, seed), values in VALUES.items()]


def test_means_and_deviations_over_seeds(cells):
    results = table.collect(cells)
    assert table.scores_table(results).splitlines() == [
        "| Model   | Loss     | data P@1        |",
        "|---------|----------|-----------------|",
        "| ADE-SPL | Standard | 50.0 ± 23.6     |",
        "| ADE-SPL | SamToNe  | **83.3 ± 23.6** |",
    ]
    row = cells[2].row
    assert results.score(row, "data", "P@1").per_seed == pytest.approx({0: 2 / 3, 1: 1.0})


def judged(cell: Cell, content: object) -> Cell:
    found = dataclasses.replace(cell, commands=Commands(training=(), testing=(), judging={"sickr": ()}))
    found.judged["sickr"].write_text(json.dumps(content))
    return found


def test_judges_have_columns_and_untrained_models_have_rows(cells, tmp_path):
    outputs = [{"spearman": {"x": 9.0, "all": rho}} for rho in (70.0, 80.0, 81.0)]
    outputs.append({"tasks": {}, "average": {"all": 81.0, "mean": 1.0}})
    of_one_tower = [dataclasses.replace(c, row=dataclasses.replace(c.row, sharing="sde")) for c in cells]
    trained = [judged(c, content) for c, content in zip(of_one_tower, outputs, strict=True)]
    row = Row(objective="GloVe")
    untrained = dataclasses.replace(cell(tmp_path, "GloVe", 0, [1, 1, 1]), row=row)
    results = table.collect([*trained, judged(untrained, {"spearman": {"all": 50.0}})])
    assert table.scores_table(results).splitlines() == [
        "| Loss     | data P@1    | data sickr Spearman |",
        "|----------|-------------|---------------------|",
        "| Standard | 50.0 ± 23.6 | 75.0 ± 7.1          |",
        "| SamToNe  | 83.3 ± 23.6 | **81.0 ± 0.0**      |",
        "| GloVe    | **100.0**   | 50.0                |",
    ]
    assert {d.metric for d in table.compare_rows(results)} == {"P@1"}
    trained[3].judged["sickr"].unlink()
    assert table.collect(trained).missing == (trained[3].name,)
    for content in ([], {}, {"spearman": {"x": 1.0}}, {"spearman": {"all": "x"}}, {"average": {"dev": 1.0}}):
        with pytest.raises(UserError, match=r"judge_sickr\.json"):
            table.collect([judged(trained[3], content)])


def test_judge_of_transfer_tasks_scores_mean_accuracy(cells):
    output = {"tasks": {"MR": {"accuracy": 76.0}}, "average": {"accuracy": 80.0, "dev": 79.0}, "missing": {}}
    results = table.collect([judged(cells[0], output)])
    assert results.score(cells[0].row, "data", "sickr accuracy").mean == pytest.approx(0.8)
    assert results.judged == {"sickr accuracy"}


def test_differences_are_paired_over_queries_and_seeds(cells):
    results = table.collect(cells)
    differences = table.compare_rows(results)
    (found,) = differences
    assert (found.row.objective, found.baseline.objective, found.seeds) == ("SamToNe", "Standard", (0, 1))
    assert found.difference == pytest.approx(1 / 3)
    assert (found.wins, found.losses, found.deviation) == (1, 0, pytest.approx(0.0))
    assert found.low == 0.0  # one of three queries differs: a resample without it has no difference
    assert found.high == pytest.approx(1.0)
    shown = table.differences_table(results, differences)
    assert "| ADE-SPL | SamToNe | Standard | data | P@1    | +33.33" in shown


def test_missing_cells_are_named_and_only_common_seeds_compared(tmp_path):
    values = VALUES | {("Standard", 1): None, ("PAIR", 0): None}
    cells = [cell(tmp_path, *of, found) for of, found in values.items()]
    results = table.collect(cells)
    assert results.missing == ("data-Standard--1", "data-PAIR--0")
    (found,) = differences = table.compare_rows(results)
    assert (found.seeds, found.deviation) == ((0,), None)
    assert table.scores_table(results).splitlines()[-1].split("|")[3].strip() == "-"
    numbers = json.loads(json.dumps(table.to_json(results, differences, cells)))
    assert numbers["missing"] == ["data-Standard--1", "data-PAIR--0"]
    assert numbers["differences"][0]["difference"] == pytest.approx(1 / 3)


def test_variants_are_compared_with_the_first_and_datasets_averaged(tmp_path):
    cells = [
        cell(tmp_path, objective, 0, [first, second], dataset=dataset, variant=variant)
        for dataset, second in (("A", 0), ("B", 1))
        for variant, shift in (("masked", 0), ("unmasked", 1))
        for objective, first in (("Standard", 0 + shift), ("SamToNe", 1 - shift))
    ]
    results = table.collect(cells)
    rows = [(d.row, d.baseline) for d in table.compare_rows(results)]
    assert {" ".join(f"{row.objective} {row.variant}" for row in pair) for pair in rows} == {
        "SamToNe masked Standard masked",
        "SamToNe unmasked Standard unmasked",
        "SamToNe unmasked SamToNe masked",
        "Standard unmasked Standard masked",
    }
    lines = table.scores_table(results).splitlines()
    header = [word.strip() for word in lines[0].strip("|").split("|")]
    assert header == ["Model", "Loss", "Variant", "A P@1", "B P@1", "Average P@1"]
    assert [word.strip(" *") for word in lines[2].strip("|").split("|")][3:] == ["0.0", "50.0", "25.0"]
