"""Makes the reports of `jaxir.evaluate` on rated sentence pairs (STS) and transfer tasks (SentEval)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.installation import require
from jaxir.evaluation.evaluation_report import Report, model_report
from jaxir.evaluation.pair_space import CUTOFFS, PairSpace
from jaxir.evaluation.senteval_files import TASKS, WHERE, read_senteval
from jaxir.evaluation.sts_files import SETTINGS, read_sts, read_sts_tasks
from jaxir.evaluation.sts_scores import STSScores, evaluate_sts
from jaxir.evaluation.text_tables import Style, format_table
from jaxir.evaluation.transfer_tasks import FOLDS, check_folds, evaluate_senteval
from jaxir.retrieval.encoding.text_encoder import DualEncoder

SENTEVAL_NOTE = """Logistic regression on the query tower's vectors, as in SentEval with kfold 10 and nhid 0
accuracy: in %, on the test set, or for MR, CR, SUBJ and MPQA the mean of ten folds
dev: the accuracy in % by which the regularisation C was chosen"""
STS_NOTE = """Spearman's correlation x 100 of cosine and human scores; the query tower encodes both sentences
several sets: 'all': of all pairs together; 'mean': mean of the sets' values; 'wmean': weighted by pairs
alignment: of pairs rated above 4; uniformity: of all sentences (for both, lower is better)
R@k: in %, the sentences of pairs rated 5 whose partner is among the k nearest of all other sentences"""

SPACE = ("alignment", "uniformity", *(f"R@{k}" for k in CUTOFFS))


def sts(model: str, directory: Path, split: str, style: Style = "markdown") -> Report:
    """Evaluates a model on rated pairs: a file, a folder of files, or a folder with a folder per task."""
    tasks = read_sts_tasks(directory, split)
    one = None if tasks else read_sts(directory)
    encoder = DualEncoder.load(model)
    if one is not None:
        scores = evaluate_sts(encoder, one)
        table = _set_table(scores, style)
        return model_report(
            encoder, model, f"sts:{directory}", f"\n{STS_NOTE}", table, style, _values(scores)
        )
    of_tasks = {name: evaluate_sts(encoder, sets) for name, sets in tasks.items()}
    average = {
        setting: float(np.mean([scores.spearman[setting] for scores in of_tasks.values()]))
        for setting in SETTINGS
    }
    rows = [
        [name, s.pairs["all"], *(s.spearman[setting] for setting in SETTINGS), *_space(s.space["all"])]
        for name, s in of_tasks.items()
    ]
    rows.append([f"average of {len(rows)}", None, *average.values(), *[None] * len(SPACE)])
    table = format_table(["task", "pairs", *SETTINGS, *SPACE], rows, digits=2, style=style)
    values = {"split": split, "tasks": {n: _values(s) for n, s in of_tasks.items()}, "average": average}
    note = f"\n{STS_NOTE}\nsplit of tasks that have train, dev and test: {split}"
    return model_report(encoder, model, f"sts:{directory}", note, table, style, values)


def senteval(model: str, directory: Path, style: Style = "markdown") -> Report:
    """Evaluates a model on all SentEval transfer tasks whose files are in a folder; needs scikit-learn."""
    require("analyze", "sklearn")
    tasks = read_senteval(directory)
    check_folds(tasks, FOLDS)
    missing = {name: list(layout.files) for name, layout in TASKS.items() if name not in tasks}
    encoder = DualEncoder.load(model)
    scores = evaluate_senteval(encoder, tasks)
    average = {key: float(np.mean([getattr(s, key) for s in scores.values()])) for key in ("accuracy", "dev")}
    rows = [[name, s.train, s.test, s.accuracy, s.f1, s.dev] for name, s in scores.items()]
    rows.append([f"average of {len(rows)}", None, None, average["accuracy"], None, average["dev"]])
    table = format_table(["task", "train", "test", "accuracy", "F1", "dev"], rows, digits=2, style=style)
    note = f"\n{SENTEVAL_NOTE}" + "".join(
        f"\n{name} is missing: {', '.join(files)} ({WHERE})" for name, files in missing.items()
    )
    found = {name: dataclasses.asdict(s) for name, s in scores.items()}
    values = {"tasks": found, "average": average, "missing": missing}
    return model_report(encoder, model, f"senteval:{directory}", note, table, style, values)


def _set_table(scores: STSScores, style: Style) -> str:
    settings = SETTINGS if len(scores.space) > 2 else ("all",)
    named = [*(name for name in scores.spearman if name not in SETTINGS), *settings]
    rows = [
        [name, scores.pairs[name], scores.spearman[name], *_space(scores.space.get(name))] for name in named
    ]
    return format_table(["set", "pairs", "Spearman", *SPACE], rows, digits=2, style=style)


def _values(scores: STSScores) -> dict[str, Any]:
    space = {
        name: {**found.numbers(), "positives": found.positives, "same": found.same}
        for name, found in scores.space.items()
    }
    return {"spearman": scores.spearman, "pairs": scores.pairs, "space": space}


def _space(space: PairSpace | None) -> list[float | None]:
    return [None] * len(SPACE) if space is None else [space.numbers()[name] for name in SPACE]
