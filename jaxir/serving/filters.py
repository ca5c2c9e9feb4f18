"""Filters of searches: conditions on the stored fields of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxir.data.formats.sources import Document

Scalar = str | int | float | bool | None
Filter = Mapping[str, Scalar | Sequence[Scalar]]


def matches(document: Document, wanted: Filter) -> bool:
    """Returns whether a document fulfils every condition.

    A field is `id`, `title` or a key of the metadata. Its condition is a value, or a list of values, one of
    which must equal the field. If the field is a list, one of its items must match. An absent field is null.
    """
    return all(_fits(_field(document, name), values) for name, values in wanted.items())


def _field(document: Document, name: str) -> Any:
    if name in ("id", "title"):
        return getattr(document, name)
    return (document.metadata or {}).get(name)


def _fits(found: Any, values: Any) -> bool:
    of_document = found if isinstance(found, list) else [found]
    of_filter = values if isinstance(values, list) else [values]
    return any(_same(a, b) for a in of_document for b in of_filter)


def _same(a: Any, b: Any) -> bool:
    """Compares as JSON does: true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)
