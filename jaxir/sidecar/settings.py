"""What the sidecar is asked with: parameters of the ranking, and documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jaxir.errors import UserError

Hits = list[tuple[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bm25:
    """BM25's parameters, by default Pyserini's (Robertson and Zaragoza, 2009).

    Attributes:
      k1: how soon more occurrences of a word stop to count.
      b: how much a document's length counts, from 0 to 1.
    """

    k1: float = 0.9
    b: float = 0.4

    def __post_init__(self):
        if not (0 <= self.k1 < float("inf") and 0 <= self.b <= 1):
            raise UserError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, not k1 = {self.k1} and b = {self.b}")


PYSERINI_BM25 = Bm25()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rm3:
    """Expansion of the query by a relevance model of the first documents found (Abdul-Jaleel et al., 2004).

    Attributes:
      documents: how many of the first documents are taken for relevant.
      terms: how many of their words the query gets.
      original_weight: the weight of the query's own words, from 0 to 1.
    """

    documents: int = 10
    terms: int = 10
    original_weight: float = 0.5

    def __post_init__(self):
        _check_feedback(self.documents, self.terms)
        if not 0 <= self.original_weight <= 1:
            raise UserError(f"RM3's original_weight must be from 0 to 1, not {self.original_weight}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rocchio:
    """Expansion of the query by the mean vector of the first documents found (Rocchio, 1971).

    Attributes:
      documents: how many of the first documents are taken for relevant.
      terms: how many of their words the query gets.
      alpha: the weight of the query's own vector.
      beta: the weight of the documents' mean.
    """

    documents: int = 10
    terms: int = 10
    alpha: float = 1.0
    beta: float = 0.75

    def __post_init__(self):
        _check_feedback(self.documents, self.terms)
        if self.alpha < 0 or self.beta < 0:
            raise UserError(f"Rocchio needs alpha, beta >= 0, not {self.alpha} and {self.beta}")


def _check_feedback(documents: int, terms: int) -> None:
    if documents < 1 or terms < 1:
        raise UserError(f"feedback needs at least 1 document and 1 term, not {documents} and {terms}")


class LuceneDocument(NamedTuple):
    """What Lucene indexes of a document: `contents`, and other fields by name."""

    id: str
    contents: str
    fields: Mapping[str, str] = {}
