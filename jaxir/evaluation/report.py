"""From files and models to what `jaxir.evaluate` prints and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.retrieval import IdenticalIds, Qrels, RetrievalScores, evaluate_run, parse_metrics
from jaxir.evaluation.significance import Comparison, compare
from jaxir.evaluation.tables import format_table
from jaxir.retrieval.runs import read_run

if TYPE_CHECKING:
    from jaxir.retrieval.dual_encoder import DualEncoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a command shows.

    Attributes:
      text: for people: how the numbers came about, then tables.
      values: for programs: the same, JSON-serialisable, with every query's values.
    """

    text: str
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """A retrieval system with its scores.

    Attributes:
      system: its name, a run file or a model.
      scores: what it scored.
      qrels: the judgements it was scored against.
      facts: how the run came about, for the report.
      note: the same as a sentence.
    """

    system: str
    scores: RetrievalScores
    qrels: Qrels
    facts: Mapping[str, Any]
    note: str


def score_run(run: str, qrels: str, metrics: str, identical_ids: IdenticalIds) -> Scored:
    """Scores a TREC run file against a file of judgements."""
    parse_metrics(metrics)
    judgements = read_judgements(qrels)
    scores = evaluate_run(read_run(run), judgements, metrics, identical_ids=identical_ids)
    return Scored(
        system=run,
        scores=scores,
        qrels=judgements,
        facts={"run": run, "qrels": qrels},
        note=f"judgements: {qrels}",
    )


def score_model(
    model: str, directory: Path, split: str, metrics: str, identical_ids: IdenticalIds, depth: int
) -> Scored:
    """Scores a model on a BEIR folder by exact search."""
    # Scoring a run file loads no jax.
    from jaxir.evaluation.collection import evaluate_collection, read_collection
    from jaxir.retrieval.dual_encoder import DualEncoder

    parse_metrics(metrics)
    collection = read_collection(directory, split)
    encoder = DualEncoder.load(model)
    scores = evaluate_collection(encoder, collection, metrics, depth=depth, identical_ids=identical_ids)
    count = len(collection.documents)
    facts = {
        "model": model,
        "fingerprint": encoder.fingerprint,
        "dataset": f"beir:{directory}",
        "split": split,
        "documents": count,
        "document_text": "(title + ' ' + text).strip()",
        **dataclasses.asdict(encoder.settings),
        "similarity": encoder.similarity,
        "search": "exact",
        "depth": depth,
    }
    return Scored(
        system=model,
        scores=scores,
        qrels=collection.qrels,
        facts=facts,
        note=f"{directory}, split {split}: {count} documents, a document's text is title + ' ' + text; "
        f"{_lengths(encoder)}; {encoder.similarity} similarity, exact search, {depth} answers a query",
    )


def retrieval(scored: Scored, *, baseline: str | None = None, per_query: bool = False) -> Report:
    """Lays out a system's scores, against a baseline run where one is given."""
    scores = scored.scores
    names = list(scores.values)
    values: dict[str, Any] = {
        **scored.facts,
        "queries": scores.queries,
        "queries_without_answers": scores.unanswered,
        "unjudged_queries_ignored": scores.unjudged,
        "identical_ids": scores.identical_ids,
        "identical_ids_found": scores.identical,
        "metrics": scores.values,
        "per_query": scores.per_query,
    }
    parts = [f"{scored.note}\n{scores.describe()}"]
    if baseline is None:
        parts.append(format_table(["system", *names], [[scored.system, *scores.values.values()]]))
    else:
        metrics = list(names)
        other = evaluate_run(read_run(baseline), scored.qrels, metrics, identical_ids=scores.identical_ids)
        comparisons = {name: compare(scores.per_query[name], other.per_query[name]) for name in names}
        parts.append(f"system: {scored.system}\nbaseline: {baseline} ({other.describe()})")
        parts.append(_comparison_table(comparisons, baseline, scored.system))
        values["baseline"] = {
            "run": baseline,
            "queries_without_answers": other.unanswered,
            "identical_ids_found": other.identical,
            "metrics": other.values,
            "per_query": other.per_query,
            "comparison": {name: dataclasses.asdict(c) for name, c in comparisons.items()},
        }
    if per_query:
        rows = [[q, *(scores.per_query[name][q] for name in names)] for q in scored.qrels]
        parts.append(format_table(["query", *names], rows))
    return Report(text="\n\n".join(parts), values=values)


def sts(model: str, directory: Path) -> Report:
    """Evaluates a model on a folder of sentence pairs."""
    from jaxir.evaluation.sts import evaluate_sts, read_sts
    from jaxir.retrieval.dual_encoder import DualEncoder

    sets = read_sts(directory)
    encoder = DualEncoder.load(model)
    scores = evaluate_sts(encoder, sets)
    note = (
        f"{directory}: Spearman's correlation x 100 of cosine and people's scores, both sentences through "
        f"the query tower; {_lengths(encoder)}\nmodel: {model}"
    )
    rows = [[name, scores.pairs[name], value] for name, value in scores.spearman.items()]
    return Report(
        text=note + "\n\n" + format_table(["set", "pairs", "Spearman"], rows, digits=2),
        values={
            "model": model,
            "fingerprint": encoder.fingerprint,
            "dataset": f"sts:{directory}",
            **dataclasses.asdict(encoder.settings),
            "spearman": scores.spearman,
            "pairs": scores.pairs,
        },
    )


def _comparison_table(comparisons: Mapping[str, Comparison], baseline: str, system: str) -> str:
    before, after = Path(baseline).stem, Path(system).stem
    if before == after:
        before, after = "baseline", "system"
    header = ["metric", before, after, "difference", "better", "worse", "t-test p", "randomisation p"]
    rows = [
        [
            name,
            c.baseline,
            c.mean,
            c.difference,
            c.wins,
            c.losses,
            f"{c.t_test:.2g}",
            f"{c.randomisation:.2g}",
        ]
        for name, c in comparisons.items()
    ]
    return format_table(header, rows)


def _lengths(encoder: DualEncoder) -> str:
    settings = encoder.settings
    return f"queries cut at {settings.query_max_length} tokens, passages at {settings.passage_max_length}"
