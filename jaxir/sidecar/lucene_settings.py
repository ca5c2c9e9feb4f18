"""What the sidecar is asked with: parameters of the ranking, and documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jaxir.core.values import Count, NotNegative, Share, checked

Hits = list[tuple[str, float]]
INSTALL = "python -m jaxir.sidecar install"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Bm25:
    """BM25's parameters, by default Pyserini's (Robertson and Zaragoza, 2009).

    Attributes:
      k1: how soon more occurrences of a word stop to count.
      b: how much a document's length counts, from 0 to 1.
    """

    k1: NotNegative = 0.9
    b: Share = 0.4


PYSERINI_BM25 = Bm25()


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Rm3:
    """Expansion of the query by a relevance model of the first documents found (Abdul-Jaleel et al., 2004).

    Attributes:
      documents: how many of the first documents are taken for relevant.
      terms: how many of their words the query gets.
      original_weight: the weight of the query's own words, from 0 to 1.
    """

    documents: Count = 10
    terms: Count = 10
    original_weight: Share = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Rocchio:
    """Expansion of the query by the mean vector of the first documents found (Rocchio, 1971).

    Attributes:
      documents: how many of the first documents are taken for relevant.
      terms: how many of their words the query gets.
      alpha: the weight of the query's own vector.
      beta: the weight of the documents' mean.
    """

    documents: Count = 10
    terms: Count = 10
    alpha: NotNegative = 1.0
    beta: NotNegative = 0.75


class LuceneDocument(NamedTuple):
    """What Lucene indexes of a document: `contents`, and other fields by name."""

    id: str
    contents: str
    fields: Mapping[str, str] = {}
