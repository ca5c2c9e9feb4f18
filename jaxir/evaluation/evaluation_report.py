"""Scores run files, answers and models, and makes the report that `jaxir.evaluate` prints and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxir.core.errors import UserError
from jaxir.data.formats.answers import read_answers, read_written
from jaxir.data.formats.collection_names import made_kind
from jaxir.evaluation.answer_match import AnswersIn, judge_by_answers
from jaxir.evaluation.exact_match import score_answers
from jaxir.evaluation.judgements import read_excluded_beside, read_judgements
from jaxir.evaluation.retrieval_metrics import (
    IdenticalIds,
    RetrievalScores,
    check_depth,
    evaluate_run,
    parse_metrics,
)
from jaxir.evaluation.significance import check_comparable
from jaxir.evaluation.systems import Pair, System, compare_systems
from jaxir.evaluation.text_tables import Style, caption, format_table
from jaxir.retrieval.ranking.exclusions import without_excluded
from jaxir.retrieval.ranking.runs import read_run

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.text_encoder import DualEncoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The report of `jaxir.evaluate`."""

    text: str  # the report as printed: a caption and tables
    values: dict[str, Any]  # the report as JSON values, with the values of every query


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """Systems to compare, with their scores."""

    systems: Sequence[System]
    facts: Mapping[str, Any]  # how the scores were computed (files and settings), for the JSON file
    note: str  # how the scores were computed, for the printed caption
    # The system of `systems` with which the others are compared. None: all pairs of systems are compared.
    baseline: System | None = None


def parse_system(text: str) -> tuple[str, list[str]]:
    """Returns the name and the run files of `[NAME=]FILE[+FILE...]`; each file is a run with another seed."""
    for found in ([text], text.split("+")):
        # If all files exist, = and + are parts of their names.
        if all(Path(file).is_file() for file in found):
            return Path(found[0]).stem, found
    name, equals, files = text.partition("=")
    if not equals:
        name, files = Path(text.split("+")[0]).stem, text
    if not all(found := files.split("+")):
        raise UserError(f"{text!r} lacks a run file: a system is written [NAME=]FILE[+FILE...]")
    return name, found


def score_runs(
    runs: Sequence[str],
    metrics: str,
    identical_ids: IdenticalIds,
    *,
    baseline: str | None = None,
    qrels: str | None = None,
    answers: str | None = None,
    corpus: str | None = None,
    answers_in: AnswersIn = "text",
    strict: bool = False,
) -> Scored:
    """Scores run files by judgements, or by whether the texts of `corpus` contain the answers.

    Each of `runs` is written `[NAME=]FILE[+FILE...]`. `baseline` is the name of one of them, or another
    system, written in the same way.
    """
    parse_metrics(metrics)
    named, against = _name_systems("--run", runs, baseline)
    if qrels is not None:
        judgements, note = read_judgements(qrels, strict=strict), f"judgements: {qrels}"
    excluded = {} if qrels is None else read_excluded_beside(qrels)
    if excluded:
        note += f", without the excluded_ids of {len(excluded):,} queries"
    read = {
        name: [without_excluded(read_run(file), excluded) for file in files] for name, files in named.items()
    }
    if answers is not None:
        every = [run for of_system in read.values() for run in of_system]
        depth = max(len(found) for run in every for found in [(), *run.values()])
        known = read_answers(answers)
        judgements = judge_by_answers(every, known, corpus, depth=depth, answers_in=answers_in)
        holds = "its text holds" if answers_in == "text" else "its title or text holds"
        note = f"a document is relevant if {holds} an answer: answers {answers}, documents {corpus}"
    systems = {
        name: System(
            name=name,
            scores=[evaluate_run(run, judgements, metrics, identical_ids=identical_ids) for run in of_system],
        )
        for name, of_system in read.items()
    }
    where = None if answers is None else answers_in
    facts = {"qrels": qrels, "answers": answers, "answers_in": where, "corpus": corpus, "runs": named}
    return Scored(
        systems=list(systems.values()),
        facts={key: value for key, value in facts.items() if value is not None},
        note=note,
        baseline=systems.get(against),
    )


def score_predictions(predictions: Sequence[str], answers: str, *, baseline: str | None = None) -> Scored:
    """Scores files of a reader's answers by exact match and F1, over all questions of the file `answers`."""
    named, against = _name_systems("--predictions", predictions, baseline)
    right = read_answers(answers)
    systems = {
        name: System(name=name, scores=[score_answers(read_written(file), right) for file in files])
        for name, files in named.items()
    }
    return Scored(
        systems=list(systems.values()),
        facts={"answers": answers, "predictions": named},
        note=f"exact match and F1 of words as in SQuAD; correct answers: {answers}",
        baseline=systems.get(against),
    )


def _name_systems(
    flag: str, systems: Sequence[str], baseline: str | None
) -> tuple[dict[str, list[str]], str | None]:
    """Returns {system name: run files}, including the baseline, and the baseline's name."""
    named: dict[str, list[str]] = {}
    for text in systems:
        name, files = parse_system(text)
        if name in named:
            raise UserError(f"two systems are called {name!r}: write NAME=FILE instead of FILE to rename one")
        named[name] = files
    every = [Path(file).resolve() for files in named.values() for file in files]
    if twice := [file for file in every if every.count(file) > 1]:
        raise UserError(f"{flag}: {twice[0]} is given twice: remove one")
    if baseline is None or baseline in named:
        return named, baseline
    name, files = parse_system(baseline)
    places = {Path(file).resolve() for file in files}
    for known, others in named.items():
        if places == {Path(file).resolve() for file in others}:
            return named, known
    name = name if name not in named else "baseline"
    if name in named:
        raise UserError(f"two systems are called {name!r}: write --baseline=NAME=FILE to rename the baseline")
    named[name] = files
    return named, name


def score_model(
    model: str,
    kind: str,
    directory: str | Path,
    split: str,
    metrics: str,
    identical_ids: IdenticalIds,
    *,
    depth: int,
    baseline: str | None = None,
    strict: bool = False,
) -> Scored:
    """Scores a model on a collection by exact search, and run files `baseline`, `[NAME=]FILE[+FILE...]`."""
    # Import these here, so that scoring a run file does not import jax.
    from jaxir.evaluation.collection import evaluate_collection
    from jaxir.evaluation.question_sets import COLLECTIONS
    from jaxir.retrieval.encoding.any_encoder import load_encoder

    check_depth(metrics, depth)
    collection = COLLECTIONS[kind](directory, split, strict=strict)
    name, files = ("", []) if baseline is None else parse_system(baseline)
    # Read the baseline's runs before encoding, because encoding takes long and the runs may be invalid.
    against = [
        evaluate_run(read_run(file), collection.qrels, metrics, identical_ids=identical_ids) for file in files
    ]
    if against:
        check_comparable(against[0].queries)
    encoder = load_encoder(model)
    scores = evaluate_collection(encoder, collection, metrics, depth=depth, identical_ids=identical_ids)
    count, without = len(collection.documents), sum(map(len, collection.excluded.values()))
    excluded = f", {without:,} excluded ids of {len(collection.excluded):,} queries" if without else ""
    systems = [System(name=model, scores=[scores])]
    if baseline is not None:
        systems.append(System(name=name if name != model else "baseline", scores=against))
    facts = {
        "model": model,
        "fingerprint": encoder.fingerprint,
        "dataset": str(directory) if made_kind(str(directory)) else f"{kind}:{directory}",
        "split": split,
        "documents": count,
        "document_text": "(title + ' ' + text).strip()",
        **encoder.settings.describe(),
        "similarity": encoder.similarity_fn_name,
        "search": "exact",
        "depth": depth,
        **({"runs": {systems[-1].name: files}} if files else {}),
    }
    return Scored(
        systems=systems,
        facts=facts,
        note=f"{directory}, split {split}: {count} documents, a document's text is title + ' ' + text; "
        f"{lengths_of(encoder)}; {encoder.similarity_fn_name} similarity, exact search, {depth} results per"
        f" query{excluded}",
        baseline=None if baseline is None else systems[-1],
    )


def retrieval(scored: Scored, *, per_query: bool = False, style: Style = "markdown") -> Report:
    """Compares systems and returns the report; `per_query` adds the values of every query to its text."""
    against = scored.baseline
    compared = [system for system in scored.systems if system is not against]
    if not compared:
        raise UserError(f"{against.name} is the only system: give another --run or --predictions")
    systems = compared if against is None else [*compared, against]
    metrics = systems[0].metrics
    pairs = compare_systems(compared, against) if len(systems) > 1 else []
    values: dict[str, Any] = {**scored.facts, **_values(systems[0])}
    parts = [_caption(scored.note, systems, style)]
    if len(systems) == 2:
        parts.append(_comparisons(pairs, systems, style))
    else:
        rows = [[system.name, *(_mean(system, metric) for metric in metrics)] for system in systems]
        parts.append(format_table(["system", *metrics], rows, style=style))
        if pairs:
            count = len(pairs) // len(metrics)
            parts.append(
                caption(f"p-values are corrected for {count} comparisons by each metric (Holm)", style)
            )
            parts.append(_comparisons(pairs, systems, style))
    if len(systems) > 1:
        values = {
            **scored.facts,
            "systems": {system.name: _values(system) for system in systems},
            "comparisons": [dataclasses.asdict(pair) for pair in pairs],
        }
    if per_query:
        found = {(s.name, m): s.per_query(m) for s in systems for m in metrics}
        head = [m if len(systems) == 1 else f"{s.name} {m}" for s in systems for m in metrics]
        queries = next(iter(found.values()))
        rows = [[query, *(of_query[query] for of_query in found.values())] for query in queries]
        parts.append(format_table(["query", *head], rows, style=style))
    return Report(text="\n\n".join(parts), values=values)


def _values(system: System) -> dict[str, Any]:
    """Returns the JSON values of a system; if it has several runs, each count is a list."""

    def counts(name: str) -> Any:
        found = [getattr(scores, name) for scores in system.scores]
        return found if len(found) > 1 else found[0]

    first = system.scores[0]
    values = {
        "queries": first.queries,
        "queries_without_answers": counts("unanswered"),
        "unjudged_queries_ignored": counts("unjudged"),
    }
    if isinstance(first, RetrievalScores):
        values |= {"identical_ids": first.identical_ids, "identical_ids_found": counts("identical")}
    values["metrics"] = {metric: system.mean(metric) for metric in system.metrics}
    if len(system.scores) > 1:
        values["deviations"] = {metric: system.deviation(metric) for metric in system.metrics}
        values["runs"] = [scores.values for scores in system.scores]
    return values | {"per_query": {metric: system.per_query(metric) for metric in system.metrics}}


def _caption(note: str, systems: Sequence[System], style: Style) -> str:
    """Returns the note and a description of the queries, with a line for each system if these differ."""
    lines = note.splitlines()
    described = {
        system.name: "; ".join(dict.fromkeys(scores.describe() for scores in system.scores))
        for system in systems
    }
    if len(set(described.values())) == 1:
        lines.append(next(iter(described.values())))
    else:
        lines += [f"{name}: {what}" for name, what in described.items()]
    lines += [
        f"{system.name}: mean ± standard deviation of {len(system.scores)} runs"
        for system in systems
        if len(system.scores) > 1
    ]
    return caption("\n".join(lines), style)


def _mean(system: System, metric: str) -> float | str:
    spread = system.deviation(metric)
    mean = system.mean(metric)
    return mean if spread is None else f"{mean:.4f} ± {spread:.4f}"


def _comparisons(pairs: Sequence[Pair], systems: Sequence[System], style: Style) -> str:
    """Returns the comparisons as a table; with two systems a row has their values, with more their names."""
    by_name = {system.name: system for system in systems}
    two = len(systems) == 2
    head = ["metric", pairs[0].baseline, pairs[0].system] if two else ["metric", "system", "against"]
    rows = []
    for pair in pairs:
        ours, theirs = by_name[pair.system], by_name[pair.baseline]
        shown = [_mean(x, pair.metric) for x in (theirs, ours)] if two else [pair.system, pair.baseline]
        # `comparison.difference` is a difference of means, but some metrics are counts, summed over queries.
        difference = ours.mean(pair.metric) - theirs.mean(pair.metric)
        p_values = [f"{pair.t_test:.2g}", f"{pair.randomisation:.2g}"]
        counts = [pair.comparison.wins, pair.comparison.losses]
        rows.append([pair.metric, *shown, difference, *counts, *p_values])
    head += ["difference", "better", "worse", "t-test p", "randomisation p"]
    return format_table(head, rows, style=style)


def model_report(
    encoder: DualEncoder, model: str, dataset: str, how: str, table: str, style: Style, values: dict[str, Any]
) -> Report:
    """Returns the report of one model: `table` with a caption, and `values` with the model's fingerprint."""
    facts = {"model": model, "fingerprint": encoder.fingerprint, "dataset": dataset}
    above = caption(f"{dataset}\nmodel: {model}; {lengths_of(encoder)}{how}", style)
    return Report(text=f"{above}\n\n{table}", values={**facts, **encoder.settings.describe(), **values})


def lengths_of(encoder: DualEncoder) -> str:
    settings = encoder.settings
    return f"queries cut at {settings.query_max_length} tokens, passages at {settings.passage_max_length}"
