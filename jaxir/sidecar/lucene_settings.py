"""Parameters of search with Lucene (BM25, RM3, Rocchio), and the type of documents to index."""

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
    """The parameters of BM25 (Robertson and Zaragoza, 2009); the defaults are Pyserini's.

    Attributes:
      k1: saturation of a word's frequency in a document: the larger k1, the more repeated words add.
      b: normalisation by the document's length, from 0 (none) to 1 (full).
    """

    k1: NotNegative = 0.9
    b: Share = 0.4


PYSERINI_BM25 = Bm25()


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Rm3:
    """RM3: expands the query by a relevance model of the first documents found (Abdul-Jaleel et al., 2004).

    Attributes:
      documents: the number of top-ranked documents that are assumed relevant.
      terms: the number of words of these documents that are added to the query.
      original_weight: the weight of the query's own words, from 0 to 1.
    """

    documents: Count = 10
    terms: Count = 10
    original_weight: Share = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Rocchio:
    """Rocchio: expands the query by the mean vector of the first documents found (Rocchio, 1971).

    Attributes:
      documents: the number of top-ranked documents that are assumed relevant.
      terms: the number of words of these documents that are added to the query.
      alpha: the weight of the query's own word vector.
      beta: the weight of the mean of the documents' word vectors.
    """

    documents: Count = 10
    terms: Count = 10
    alpha: NotNegative = 1.0
    beta: NotNegative = 0.75


class LuceneDocument(NamedTuple):
    """A document to index with Lucene: its id, its text (`contents`), and further `fields` by name."""

    id: str
    contents: str
    fields: Mapping[str, str] = {}
