"""Table 1 of Moiseev et al. 2023 from the scores of a grid, with deviations and confidence intervals."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.core.values import check_value
from jaxir.evaluation.significance import compare, confidence_interval
from jaxir.evaluation.systems import deviation, over_runs
from jaxir.evaluation.text_tables import format_table
from jaxir.experiments.grid_cells import SHARING_TITLES, Cell, Row
from jaxir.storage.files import atomic_file
from jaxir.storage.json_files import read_json

LEVEL = 0.95
MISSING = "-"
JUDGED = {"all": "Spearman", "accuracy": "accuracy"}  # key in a judge's file -> name in tables


class Score(NamedTuple):
    """A score of one row of the table, by one metric on one data set."""

    mean: float  # mean over seeds
    deviation: float | None  # sample standard deviation over seeds; None for one seed
    per_seed: dict[int, float]  # seed -> value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between a row and its baseline, by one metric on one data set."""

    row: Row
    baseline: Row  # the row with the first objective, or the first variant
    dataset: str
    metric: str
    seeds: tuple[int, ...]  # the seeds of both rows; other fields are means over these
    difference: float  # difference of the means over queries
    low: float  # lower end of the difference's 95 % confidence interval over queries
    high: float  # upper end of that interval
    deviation: float | None  # standard deviation of the difference over seeds; None for one seed
    wins: int  # number of queries on which the row is better
    losses: int  # number of queries on which the row is worse
    p: float  # two-sided p-value of the paired randomisation test over queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a grid's finished cells; rows, data sets and metrics in the order of the grid."""

    rows: tuple[Row, ...]
    datasets: tuple[str, ...]
    metrics: tuple[str, ...]
    # Scores: (row, data set, metric) -> seed -> query id -> value.
    values: Mapping[tuple[Row, str, str], Mapping[int, Mapping[str, float]]]
    missing: tuple[str, ...]  # names of unfinished cells
    judged: frozenset[str] = frozenset()  # the judges' metrics, which have no values per query

    def score(self, row: Row, dataset: str, metric: str) -> Score | None:
        """Returns mean and deviation over seeds; None if no cell has a result."""
        values = self.values.get((row, dataset, metric))
        if values is None:
            return None
        means = {seed: float(np.mean(list(of_queries.values()))) for seed, of_queries in values.items()}
        mean = float(np.mean(list(means.values())))
        return Score(mean=mean, deviation=deviation(means.values()), per_seed=means)


def read_scores(path: Path) -> dict[str, Any]:
    """Reads the file that `jaxir.evaluate --output` wrote, which has "metrics" and "per_query"."""
    found = read_json(path, dict[str, Any])
    kinds = {"metrics": dict[str, float], "per_query": dict[str, dict[str, float]]}
    for name, kind in kinds.items():
        check_value(f"{path}: {name}", found.get(name), kind)
    if found["metrics"].keys() != found["per_query"].keys():
        raise UserError(f"{path}: metrics and per_query differ; remake it by jaxir.evaluate --per_query")
    return found


def read_judges(cell: Cell) -> dict[str, float]:
    """Reads the judges' scores of a cell, by "NAME Spearman" or "NAME accuracy".

    A score is Spearman's correlation over all pairs, its mean over tasks, or the mean accuracy over tasks.
    """
    scores = {}
    for name, path in cell.judged.items():
        found = read_json(path, dict[str, Any])
        values = found.get("average", found.get("spearman"))
        check_value(f"{path}: average or spearman", values, dict[str, float])
        measure = next((key for key in JUDGED if key in values), None)
        if measure is None:
            raise UserError(f"{path}: has neither a correlation nor an accuracy; remove it to judge again")
        scores[f"{name} {JUDGED[measure]}"] = values[measure] / 100
    return scores


def collect(cells: Sequence[Cell]) -> Results:
    """Reads the results of all finished cells."""
    found: dict[tuple[Row, str, str], dict[int, Mapping[str, float]]] = {}
    missing, judged = [], {}
    for cell in cells:
        if not cell.finished:
            missing.append(cell.name)
            continue
        judged |= (of_judges := read_judges(cell))
        scores = read_scores(cell.result)["per_query"] | {name: {"all": x} for name, x in of_judges.items()}
        for metric, values in scores.items():
            found.setdefault((cell.row, cell.dataset, metric), {})[cell.seed] = values
    return Results(
        rows=tuple(dict.fromkeys(cell.row for cell in cells)),
        datasets=tuple(dict.fromkeys(cell.dataset for cell in cells)),
        metrics=tuple(dict.fromkeys(metric for _, _, metric in found)),
        values=found,
        missing=tuple(missing),
        judged=frozenset(judged),
    )


def compare_rows(results: Results) -> list[Difference]:
    """Compares every row with its baselines; with many queries a comparison takes a second or two."""
    places = [
        (row, other, dataset, metric)
        for row in results.rows
        for other in baselines(row, results.rows)
        for dataset, metric in itertools.product(results.datasets, results.metrics)
        if metric not in results.judged
        if common_seeds(results, (row, dataset, metric), (other, dataset, metric))
    ]
    return [difference(results, *place) for place in progress(places, what="comparing", unit="pairs")]


def common_seeds(results: Results, *places: tuple[Row, str, str]) -> tuple[int, ...]:
    """Returns the seeds for which all of `places`, (row, data set, metric), have a score."""
    return tuple(sorted(set.intersection(*(set(results.values.get(place, ())) for place in places))))


def baselines(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the first objective and with the first variant, all else equal."""
    first_objective = dataclasses.replace(row, objective=rows[0].objective)
    first_variant = dataclasses.replace(row, variant=rows[0].variant)
    return [other for other in (first_objective, first_variant) if other != row and other in rows]


def difference(results: Results, row: Row, baseline: Row, dataset: str, metric: str) -> Difference:
    """Compares two rows by their scores on each query, over common seeds."""
    seeds = common_seeds(results, (row, dataset, metric), (baseline, dataset, metric))
    ours, theirs = results.values[row, dataset, metric], results.values[baseline, dataset, metric]
    system, other = (over_runs([values[seed] for seed in seeds]) for values in (ours, theirs))
    comparison = compare(system, other)
    low, high = confidence_interval(system, other, level=LEVEL)
    of_seeds = [np.mean(list(ours[s].values())) - np.mean(list(theirs[s].values())) for s in seeds]
    return Difference(
        row=row,
        baseline=baseline,
        dataset=dataset,
        metric=metric,
        seeds=seeds,
        difference=comparison.difference,
        low=low,
        high=high,
        deviation=deviation(of_seeds),
        wins=comparison.wins,
        losses=comparison.losses,
        p=comparison.randomisation,
    )


def scores_table(results: Results) -> str:
    """Formats the scores like the paper's Table 1 (Table 4 with several models): in %, mean ± deviation.

    The best mean of each column is bold. The average over data sets is given only if none is missing.
    """
    columns = list(itertools.product(results.datasets, results.metrics))
    lines: list[list[tuple[str, float | None]]] = []
    for row in results.rows:
        line = [_cell(results.score(row, *column)) for column in columns]
        if len(results.datasets) > 1:
            for metric in results.metrics:
                found = [results.score(row, dataset, metric) for dataset in results.datasets]
                mean = None if None in found else float(np.mean([s.mean for s in found if s]))
                line.append((MISSING if mean is None else f"{100 * mean:.1f}", mean))
        lines.append(line)
    best = [max((v for _, v in column if v is not None), default=None) for column in zip(*lines, strict=True)]
    shown = [
        [f"**{text}**" if value is not None and value == top else text for (text, value), top in pairs]
        for pairs in (zip(line, best, strict=True) for line in lines)
    ]
    header = [f"{dataset} {metric}" for dataset, metric in columns]
    header += [f"Average {metric}" for metric in results.metrics] if len(results.datasets) > 1 else []
    names, heads = _row_names(results.rows)
    return format_table(
        [*names, *header], [[*heads[row], *line] for row, line in zip(results.rows, shown, strict=True)]
    )


def differences_table(results: Results, differences: Sequence[Difference]) -> str:
    """Formats the differences, in percentage points."""
    names, heads = _row_names(results.rows)
    body = [
        [
            *heads[d.row],
            " ".join(new for new, old in zip(heads[d.baseline], heads[d.row], strict=True) if new != old),
            d.dataset,
            d.metric,
            f"{100 * d.difference:+.2f}",
            f"[{100 * d.low:+.2f}, {100 * d.high:+.2f}]",
            MISSING if d.deviation is None else f"{100 * d.deviation:.2f}",
            d.wins,
            d.losses,
            f"{d.p:.2g}",
        ]
        for d in differences
    ]
    header = ["against", "data", "metric", "difference", "95 % interval", "sd over seeds"]
    return format_table([*names, *header, "better", "worse", "p"], body)


def to_json(results: Results, differences: Sequence[Difference], cells: Sequence[Cell]) -> dict[str, Any]:
    """Returns all numbers of a grid except the values of single queries, which are in the cells' files."""
    places = itertools.product(results.rows, results.datasets, results.metrics)
    found = {place: score for place in places if (score := results.score(*place))}
    return {
        "scores": [
            {**dataclasses.asdict(row), "dataset": dataset, "metric": metric, **score._asdict()}
            for (row, dataset, metric), score in found.items()
        ],
        "differences": [dataclasses.asdict(d) for d in differences],
        "missing": list(results.missing),
        "cells": {
            cell.name: {"result": str(cell.result), "commands": cell.commands.lines()} for cell in cells
        },
    }


def write_tables(cells: Sequence[Cell], out: Path, *, finished: bool = False) -> str:
    """Writes table.md and results.json, with comparisons once the grid is finished; returns the table."""
    results = collect(cells)
    differences = compare_rows(results) if finished else []
    text = scores_table(results)
    if differences:
        text += "\n\n" + differences_table(results, differences)
    if results.missing:
        text += f"\n\n{len(results.missing)} of {len(cells)} cells are missing."
    with atomic_file(out / "table.md") as file:
        file.write(text + "\n")
    with atomic_file(out / "results.json") as file:
        json.dump(to_json(results, differences, cells), file, indent=2, ensure_ascii=False)
        file.write("\n")
    return text


def _row_names(rows: Sequence[Row]) -> tuple[list[str], dict[Row, list[str]]]:
    """Returns the columns that name a row, without constant columns, and each row's cells.

    The column of towers stays unless all models have one tower.
    """
    named = {"Size": "model", "Model": "sharing", "Loss": "objective", "Variant": "variant"}
    always = ("Loss",) if {row.sharing for row in rows} <= {"sde", ""} else ("Model", "Loss")
    columns = [
        title
        for title, field in named.items()
        if title in always or len({getattr(r, field) for r in rows} - {""}) > 1
    ]
    titles = {
        row: [SHARING_TITLES.get(value := getattr(row, named[column]), value) for column in columns]
        for row in rows
    }
    return columns, titles


def _cell(found: Score | None) -> tuple[str, float | None]:
    if found is None:
        return MISSING, None
    spread = "" if found.deviation is None else f" ± {100 * found.deviation:.1f}"
    return f"{100 * found.mean:.1f}{spread}", found.mean


def rounds_table(results: Sequence[Path]) -> str:
    """Formats the scores of rounds, each compared with the previous round by a paired randomisation test."""
    scores = [read_scores(path) for path in results]
    rows = []
    for number, found in enumerate(scores):
        row: list[object] = [number]
        for metric, value in found["metrics"].items():
            before = scores[number - 1]["per_query"][metric] if number else None
            p = None if before is None else compare(found["per_query"][metric], before).randomisation
            row += [value, MISSING if p is None else f"{p:.2g}"]
        rows.append(row)
    header = [cell for metric in scores[0]["metrics"] for cell in (metric, "p against the round before")]
    return format_table(["round", *header], rows)
