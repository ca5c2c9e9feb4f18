"""The reports of `jaxir.evaluate` for a model on CQADupStack and NanoBEIR: each collection, and the mean."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.evaluation.collection import Collection, evaluate_collection
from jaxir.evaluation.evaluation_report import Report, model_report
from jaxir.evaluation.nanobeir_sets import PLACE, read_nanobeir
from jaxir.evaluation.question_sets import CQADUPSTACK, FORUMS, read_cqadupstack
from jaxir.evaluation.retrieval_metrics import IdenticalIds, check_depth, parse_metrics
from jaxir.evaluation.text_tables import Style, format_table
from jaxir.retrieval.encoding.any_encoder import load_encoder


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
    forums = read_cqadupstack(directory, split, strict=strict)
    missing = [forum for forum in FORUMS if forum not in forums]
    notes = f"; split {split}" + (f"\nmissing: {', '.join(missing)} ({CQADUPSTACK})" if missing else "")
    how = {"depth": depth, "identical_ids": identical_ids, "style": style, "noun": "forum", "notes": notes}
    facts = {"split": split, "missing": missing}
    return _report(model, f"cqadupstack:{directory}", forums, metrics, facts, **how)


def nanobeir(
    model: str,
    place: str,
    metrics: str,
    identical_ids: IdenticalIds,
    *,
    depth: int,
    strict: bool = False,
    style: Style = "markdown",
) -> Report:
    """Scores a model on NanoBEIR's 13 collections by exact search, and computes their mean.

    `place` is where the collections are (see `read_nanobeir`); "" for those of the hub.
    """
    check_depth(metrics, depth)
    place = place or PLACE
    found = read_nanobeir(place, strict=strict)
    how = {"depth": depth, "identical_ids": identical_ids, "style": style, "noun": "collection", "notes": ""}
    return _report(model, f"nanobeir:{place}", found, metrics, {}, **how)


def _report(
    model: str,
    dataset: str,
    collections: Mapping[str, Collection],
    metrics: str,
    facts: dict[str, Any],
    *,
    depth: int,
    identical_ids: IdenticalIds,
    style: Style,
    noun: str,
    notes: str,
) -> Report:
    names = list(parse_metrics(metrics))
    encoder = load_encoder(model)
    scores = {
        name: evaluate_collection(encoder, collection, metrics, depth=depth, identical_ids=identical_ids)
        for name, collection in collections.items()
    }
    mean = {name: statistics.fmean(found.values[name] for found in scores.values()) for name in names}
    documents = {name: len(collection.documents) for name, collection in collections.items()}
    rows = [
        [name, documents[name], found.queries, *(found.values[metric] for metric in names)]
        for name, found in scores.items()
    ]
    rows.append([f"mean of {len(rows)}", None, None, *mean.values()])
    how = f"; {encoder.similarity_fn_name} similarity, exact search within a {noun}, {depth} results per"
    how += f" query{notes}"
    each = {
        name: {
            "documents": documents[name],
            "queries": found.queries,
            "identical_ids": found.identical_ids,
            "identical_ids_found": found.identical,
            "metrics": found.values,
            "per_query": found.per_query,
        }
        for name, found in scores.items()
    }
    values = {"depth": depth, "metrics": mean, **facts, f"{noun}s": each}
    table = format_table([noun, "documents", "queries", *names], rows, style=style)
    return model_report(encoder, model, dataset, how, table, style, values)
