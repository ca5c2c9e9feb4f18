"""The report of `jaxir.evaluate` for a model on CQADupStack: scores of each forum, and their mean."""

from __future__ import annotations

import statistics
from pathlib import Path

from jaxir.evaluation.collection import evaluate_collection
from jaxir.evaluation.evaluation_report import Report, model_report
from jaxir.evaluation.question_sets import CQADUPSTACK, FORUMS, read_cqadupstack
from jaxir.evaluation.retrieval_metrics import IdenticalIds, check_depth, parse_metrics
from jaxir.evaluation.text_tables import Style, format_table
from jaxir.retrieval.encoding.text_encoder import DualEncoder


def cqadupstack(
    model: str,
    directory: Path,
    split: str,
    metrics: str,
    identical_ids: IdenticalIds,
    *,
    depth: int,
    strict: bool = False,
    style: Style = "markdown",
) -> Report:
    """Scores a model on each forum of CQADupStack by exact search, and computes the mean over forums."""
    check_depth(metrics, depth)
    names = list(parse_metrics(metrics))
    forums = read_cqadupstack(directory, split, strict=strict)
    encoder = DualEncoder.load(model)
    scores = {
        forum: evaluate_collection(encoder, collection, metrics, depth=depth, identical_ids=identical_ids)
        for forum, collection in forums.items()
    }
    mean = {name: statistics.fmean(found.values[name] for found in scores.values()) for name in names}
    documents = {forum: len(collection.documents) for forum, collection in forums.items()}
    rows = [
        [forum, documents[forum], found.queries, *(found.values[name] for name in names)]
        for forum, found in scores.items()
    ]
    rows.append([f"mean of {len(rows)}", None, None, *mean.values()])
    how = f"; {encoder.similarity} similarity, exact search within a forum, {depth} results per query"
    how += f"; split {split}"
    missing = [forum for forum in FORUMS if forum not in forums]
    if missing:
        how += f"\nmissing: {', '.join(missing)} ({CQADUPSTACK})"
    values = {
        "split": split,
        "depth": depth,
        "metrics": mean,
        "missing": missing,
        "forums": {
            forum: {
                "documents": documents[forum],
                "queries": found.queries,
                "identical_ids": found.identical_ids,
                "identical_ids_found": found.identical,
                "metrics": found.values,
                "per_query": found.per_query,
            }
            for forum, found in scores.items()
        },
    }
    table = format_table(["forum", "documents", "queries", *names], rows, style=style)
    return model_report(encoder, model, f"cqadupstack:{directory}", how, table, style, values)
