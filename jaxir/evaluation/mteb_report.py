"""Compares two models by MTEB's results: paired tests over the queries of each task, and over the tasks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.evaluation.evaluation_report import Report
from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.mteb_files import Evaluated, Part, read_evaluated
from jaxir.evaluation.retrieval_metrics import IdenticalIds, evaluate_run
from jaxir.evaluation.significance import Comparison, compare, holm
from jaxir.evaluation.text_tables import Style, caption, format_table

_NAMES = {"ndcg": "nDCG", "map": "AP", "mrr": "RR", "recall": "R", "precision": "P", "hit_rate": "Success"}
_ROUNDED = 1e-4  # MTEB rounds the scores in its files to 5 decimals
# Assumed if several scores have the main score's value, because most tasks have this main score.
_PREFERRED = "ndcg_at_10"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A comparison of two models on one part of a task; scores are MTEB's main score.

    `queries` has the two models' values by query of `metric`, if the part could be tested; else `reason` says
    why not. p-values are corrected for all tested parts (Holm).
    """

    part: Part
    system: float
    baseline: float
    metric: str | None = None
    comparison: Comparison | None = None
    reason: str = ""
    t_test: float | None = None
    randomisation: float | None = None


def report(
    system: str,
    baseline: str,
    *,
    qrels: str | None = None,
    per_query: bool = False,
    style: Style = "markdown",
) -> Report:
    """Compares two models, each given as `[NAME=]DIR[+DIR...]` (see `read_evaluated`).

    Args:
      system: the model.
      baseline: the model to compare it with.
      qrels: judgements of the tasks: a folder with TASK.tsv, or the file of the only task. None: MTEB loads
        the tasks' data, if it is installed.
      per_query: whether to add the values of every query to the text.
      style: format of the tables.
    """
    ours, theirs = _distinct(read_evaluated(system), read_evaluated(baseline))
    parts = [part for part in theirs.scores if part in ours.scores]
    if not parts:
        raise UserError(f"{system} and {baseline} have no task in common: evaluate both models on the same")
    values: dict[Part, tuple[dict[str, float], dict[str, float]]] = {}
    judged = _Judged(qrels)
    rows = _corrected([_row(part, ours, theirs, judged, values) for part in parts])
    across = _across_tasks(rows)
    text = [
        caption(_note(ours, theirs, rows), style),
        _table(rows, ours.name, theirs.name, style),
        *_table_across(across, ours.name, theirs.name, style),
    ]
    if per_query:
        head = ["task", "query", theirs.name, ours.name]
        lines = [
            [str(part), query, of_theirs[query], of_ours[query]]
            for part, (of_ours, of_theirs) in values.items()
            for query in of_ours
        ]
        text.append(format_table(head, lines, style=style))
    return Report(text="\n\n".join(text), values=_json(ours, theirs, rows, across, values))


class _Judged:
    """The judgements of tasks, from files or from MTEB."""

    def __init__(self, qrels: str | None):
        self._place = Path(qrels) if qrels is not None else None
        self._tasks: dict[str, Any] = {}

    def of(self, part: Part) -> dict[str, dict[str, int]] | str:
        """Returns {query id: {document id: relevance}}, or the reason why there are no judgements."""
        if self._place is not None:
            file = self._place / f"{part.task}.tsv" if self._place.is_dir() else self._place
            return read_judgements(file) if file.is_file() else f"no {file}"
        try:
            if part.task not in self._tasks:
                import mteb

                task = mteb.get_task(part.task)
                task.load_data()
                self._tasks = {part.task: task}  # keep the judgements of one task in memory at a time
            found = self._tasks[part.task].dataset[part.subset][part.split]["relevant_docs"]
        except ImportError:
            return "no judgements: install MTEB or give --qrels"
        except KeyError:
            return "MTEB knows no task, subset or split of this name: give --qrels"
        except Exception as error:  # for example, the task's data cannot be downloaded
            return f"no judgements from MTEB ({type(error).__name__}): give --qrels"
        # Sort: MTEB's order differs from process to process, and the test's random sign flips depend on it.
        return {
            str(query): {str(d): int(r) for d, r in of_query.items()}
            for query, of_query in sorted(found.items())
        }


def _row(
    part: Part,
    ours: Evaluated,
    theirs: Evaluated,
    judged: _Judged,
    values: dict[Part, tuple[dict[str, float], dict[str, float]]],
) -> Row:
    scores = {"system": ours.scores[part]["main_score"], "baseline": theirs.scores[part]["main_score"]}
    runs = [model.ranked(part) for model in (ours, theirs)]
    if None in runs:
        lacking = [model.name for model, run in zip((ours, theirs), runs, strict=True) if run is None]
        whose = "either model" if len(lacking) == 2 else lacking[0]
        return Row(part=part, **scores, reason=f"no rankings of {whose} in the folders")
    qrels = judged.of(part)
    if isinstance(qrels, str):
        return Row(part=part, **scores, reason=qrels)
    qrels = {query: docs for query, docs in qrels.items() if any(r > 0 for r in docs.values())}
    metric = _metric(ours.scores[part], theirs.scores[part])
    found = None if metric is None else _per_query(runs, qrels, metric, [*scores.values()])
    if found is None or len(qrels) < 2:
        return Row(part=part, **scores, reason="the rankings do not give the main score")
    values[part] = found
    return Row(part=part, **scores, metric=metric, comparison=compare(*found))


def _metric(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str | None:
    """Returns the main score's name in ir_measures' spelling. MTEB's files lack it: found by its value."""
    for name in sorted(ours, key=lambda name: name != _PREFERRED):
        found = re.fullmatch(r"([a-z_]+)_at_(\d+)", name)
        is_main = all(scores.get(name) == scores["main_score"] for scores in (ours, theirs))
        if found and found[1] in _NAMES and is_main:
            return f"{_NAMES[found[1]]}@{found[2]}"
    return None


def _per_query(
    runs: Sequence[Any], qrels: Mapping[str, Mapping[str, int]], metric: str, means: Sequence[float]
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Returns both models' values by query, if their means are MTEB's scores.

    Some tasks (ArguAna) leave a query's own document out, but MTEB's files do not say which tasks do.
    """
    kinds: tuple[IdenticalIds, ...] = ("keep", "drop")
    for identical_ids in kinds:
        found = [evaluate_run(run, qrels, metric, identical_ids=identical_ids) for run in runs]
        if all(abs(f.values[metric] - mean) < _ROUNDED for f, mean in zip(found, means, strict=True)):
            return found[0].per_query[metric], found[1].per_query[metric]
    return None


def _corrected(rows: Sequence[Row]) -> list[Row]:
    tested = [row for row in rows if row.comparison is not None]
    t_tests = dict(zip(map(id, tested), holm([row.comparison.t_test for row in tested]), strict=True))
    swaps = dict(zip(map(id, tested), holm([row.comparison.randomisation for row in tested]), strict=True))
    return [
        dataclasses.replace(row, t_test=t_tests.get(id(row)), randomisation=swaps.get(id(row)))
        for row in rows
    ]


def _across_tasks(rows: Sequence[Row]) -> Comparison | None:
    """Compares the models over tasks (a task's score is the mean over its parts); None for one task."""
    tasks = {row.part.task: [other for other in rows if other.part.task == row.part.task] for row in rows}
    if len(tasks) < 2:
        return None
    ours = {task: float(np.mean([row.system for row in of_task])) for task, of_task in tasks.items()}
    theirs = {task: float(np.mean([row.baseline for row in of_task])) for task, of_task in tasks.items()}
    return compare(ours, theirs)


def _note(ours: Evaluated, theirs: Evaluated, rows: Sequence[Row]) -> str:
    lines = [f"MTEB's main scores of {ours.name} and {theirs.name} (baseline)"]
    for one, other in ((ours, theirs), (theirs, ours)):
        if alone := sorted({part.task for part in one.scores if part not in other.scores}):
            lines.append(f"left out, because only {one.name} has them: {', '.join(alone)}")
    tested = sum(row.comparison is not None for row in rows)
    lines.append(
        f"p-values are of tests over a task's queries, corrected for the {tested} tested here (Holm)"
        if tested
        else "no task is tested by itself: that needs rankings (`prediction_folder`) and judgements"
    )
    for reason in dict.fromkeys(row.reason for row in rows if row.comparison is None):
        parts = ", ".join(str(row.part) for row in rows if row.reason == reason)
        lines.append(f"not tested, {reason}: {parts}")
    return "\n".join(lines)


def _table(rows: Sequence[Row], ours: str, theirs: str, style: Style) -> str:
    head = ["task", theirs, ours, "difference", "queries", "better", "worse"]
    head += ["t-test p", "randomisation p"]
    lines = []
    for row in rows:
        cells: list[object] = [str(row.part), row.baseline, row.system, row.system - row.baseline]
        if row.comparison is None:
            cells += [None, None, None, "", ""]
        else:
            found = row.comparison
            cells += [found.queries, found.wins, found.losses]
            cells += [f"{row.t_test:.2g}", f"{row.randomisation:.2g}"]
        lines.append(cells)
    return format_table(head, lines, style=style)


def _table_across(across: Comparison | None, ours: str, theirs: str, style: Style) -> list[str]:
    if across is None:
        return []
    head = ["mean over", theirs, ours, "difference", "better", "worse", "t-test p", "randomisation p"]
    p_values = [f"{across.t_test:.2g}", f"{across.randomisation:.2g}"]
    line = [f"{across.queries} tasks", across.baseline, across.mean, across.difference]
    note = "tested over the tasks, one score each: would other tasks of this kind show the difference?"
    return [
        caption(note, style),
        format_table(head, [[*line, across.wins, across.losses, *p_values]], style=style),
    ]


def _json(
    ours: Evaluated,
    theirs: Evaluated,
    rows: Sequence[Row],
    across: Comparison | None,
    values: Mapping[Part, tuple[dict[str, float], dict[str, float]]],
) -> dict[str, Any]:
    systems = {"system": ours, "baseline": theirs}
    return {
        "systems": {key: {"name": model.name, "revision": model.revision} for key, model in systems.items()},
        "comparisons": [
            {**dataclasses.asdict(row), "part": row.part._asdict(), "per_query": values.get(row.part)}
            for row in rows
        ],
        "across_tasks": None if across is None else dataclasses.asdict(across),
    }


def _distinct(ours: Evaluated, theirs: Evaluated) -> tuple[Evaluated, Evaluated]:
    """Returns both models, renamed if they have the same name."""
    if ours.name != theirs.name:
        return ours, theirs
    ends = [model.revision[:8] for model in (ours, theirs)]
    ends = ends if ends[0] != ends[1] and all(ends) else ["1", "2"]
    return tuple(
        dataclasses.replace(model, name=f"{model.name}@{end}")
        for model, end in zip((ours, theirs), ends, strict=True)
    )
