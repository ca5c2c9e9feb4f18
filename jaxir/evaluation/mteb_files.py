"""Reads what MTEB writes: results (TASK.json) and predictions (TASK_predictions.json) of one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxir.core.errors import UserError
from jaxir.storage.json_files import read_json

_PREDICTIONS = "_predictions.json"


class Part(NamedTuple):
    """A part of a task with its own score: a split and a subset (a language, or `default`)."""

    task: str
    split: str
    subset: str

    def __str__(self) -> str:
        more = [name for name, usual in ((self.subset, "default"), (self.split, "test")) if name != usual]
        return f"{self.task} ({', '.join(more)})" if more else self.task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A model's results.

    Attributes:
      name: the model's name.
      revision: the model's revision in MTEB's files; "" if they have none.
      scores: the numbers of each part by MTEB's names, with the `main_score` of the task.
      predictions: the file of predictions of each task that has one of this model.
    """

    name: str
    revision: str
    scores: Mapping[Part, Mapping[str, float]]
    predictions: Mapping[str, Path]

    def ranked(self, part: Part) -> dict[str, dict[str, float]] | None:
        """Returns {query id: {document id: score}}, or None if there are no predictions of a search."""
        path = self.predictions.get(part.task)
        if path is None:
            return None
        found = read_json(path, dict[str, Any]).get(part.subset, {}).get(part.split)
        searched = isinstance(found, dict) and all(isinstance(docs, dict) for docs in found.values())
        return found if searched else None


def read_evaluated(text: str) -> Evaluated:
    """Reads `[NAME=]DIR[+DIR...]`: folders that together have the results and predictions of one model.

    Raises:
      UserError: a folder is missing, has results of several models, or none.
    """
    name, equals, places = text.partition("=")
    if not equals or Path(text).exists():
        name, places = "", text
    folders = [Path(text)] if Path(text).is_dir() else [Path(place) for place in places.split("+")]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such directory; give a folder of MTEB's results")
    files = [file for folder in folders for file in sorted(folder.rglob("*.json"))]
    predictions = [file for file in files if file.name.endswith(_PREDICTIONS)]
    results: dict[Path, dict[str, Any]] = {}
    for file in files:
        if file not in predictions and file.name != "model_meta.json":
            content = read_json(file)
            if isinstance(content, dict) and {"task_name", "scores"} <= content.keys():
                results[file] = content
    homes = sorted({file.parent for file in results})
    if not homes:
        raise UserError(f"{text}: no results of MTEB (TASK.json) in it; give the `cache` of mteb.evaluate")
    if len(homes) > 1:
        listed = ", ".join(map(str, homes[:4])) + (" ..." if len(homes) > 4 else "")
        raise UserError(f"{text} has results of several models or revisions: give one of {listed}")
    meta = homes[0] / "model_meta.json"
    about = read_json(meta, dict[str, Any]) if meta.is_file() else {}
    known = (about.get("name"), about.get("revision"))
    scores: dict[Part, Mapping[str, float]] = {}
    for file, content in results.items():
        scores |= _scores(file, content)
    return Evaluated(
        name=name or known[0] or homes[0].name,
        revision=known[1] or "",
        scores=scores,
        predictions={
            file.name.removesuffix(_PREDICTIONS): file
            for file in predictions
            if not about or _model_of(file) == known
        },
    )


def _scores(file: Path, content: Mapping[str, Any]) -> dict[Part, Mapping[str, float]]:
    found = {}
    try:
        for split, subsets in content["scores"].items():
            for scores in subsets:
                part = Part(str(content["task_name"]), split, scores["hf_subset"])
                found[part] = {k: float(v) for k, v in scores.items() if isinstance(v, int | float)}
                found[part]["main_score"]  # raises KeyError if the file has no main score
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a result of MTEB 2: evaluate the task again with it") from error
    return found


def _model_of(predictions: Path) -> tuple[Any, Any]:
    about = read_json(predictions, dict[str, Any]).get("mteb_model_meta") or {}
    return about.get("model_name"), about.get("revision")
