"""Collections of the package ir_datasets, such as beir/scifact/test or msmarco-passage/dev/small."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from jaxir.core.errors import UserError, suggest
from jaxir.core.installation import require
from jaxir.data.formats.hub_collections import StoredCollection
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.qrels import Qrel
from jaxir.data.formats.sources import Document, Query
from jaxir.storage import fingerprints

SPLIT = "test"  # an id of ir_datasets names one set of judgements, which gets this name


def open_ir_collection(name: str, on_bad_input: OnBadInput) -> StoredCollection:
    """Opens ir_datasets:NAME, a data set with documents, queries and judgements. ir_datasets downloads it.

    A document's title is its field `title`; its text is the field `text`, else all fields of text.
    """
    require("ir_datasets", "ir_datasets")
    import ir_datasets

    try:
        dataset = ir_datasets.load(name)
    except KeyError:
        near = suggest(name, list(ir_datasets.registry))
        raise UserError(f"ir_datasets has no data set {name!r}{near or '; check the name'}") from None
    lacking = [kind for kind in ("docs", "queries", "qrels") if not dataset.has(kind)]
    if lacking:
        more = [other for other in ir_datasets.registry if str(other).startswith(f"{name}/")]
        hint = f": give a part with judgements, such as ir_datasets:{more[0]}" if more else ""
        raise UserError(f"ir_datasets:{name} has no {' and no '.join(lacking)}{hint}")
    judged = [(q.query_id, q.doc_id, q.relevance) for q in dataset.qrels_iter()]
    content = fingerprints.of_values(*judged, *((q.query_id, _text(q)) for q in dataset.queries_iter()))
    identity = [name, dataset.docs_count(), content]
    qrels = {SPLIT: lambda: (Qrel(*row) for row in dict.fromkeys(judged))}
    return StoredCollection(
        identity, functools.partial(_documents, dataset), functools.partial(_queries, dataset), qrels
    )


def _documents(dataset: Any) -> Iterator[Document]:
    for found in dataset.docs_iter():
        title = getattr(found, "title", "") or ""
        text = getattr(found, "text", None)
        yield (
            Document(found.doc_id, title, text)
            if text is not None
            else Document(found.doc_id, "", _text(found))
        )


def _queries(dataset: Any) -> Iterator[Query]:
    return (Query(found.query_id, _text(found)) for found in dataset.queries_iter())


def _text(found: Any) -> str:
    return found.default_text()
