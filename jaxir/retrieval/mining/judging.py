"""Drops false negatives among candidates with a cross-encoder.

Many documents that a retriever finds are relevant, but not judged. Like in RocketQA's denoising (Qu et al.
2021, section 4.2), a cross-encoder scores each candidate with its query; relevant candidates are dropped.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.sources import read_wanted
from jaxir.retrieval.mining.mining_settings import RelevanceSettings
from jaxir.retrieval.ranking.run_reranking import texts_of_queries

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.pair_scorer import CrossEncoder

# Drawn candidates of a query: (position among all candidates of the query, document id).
Drawn = list[tuple[int, str]]


class RelevanceFilter:
    """Drops candidates that a cross-encoder finds relevant, and counts them by reason."""

    ABOVE, NEAR = "max_relevance", "relevance_margin"

    def __init__(
        self,
        judge: CrossEncoder,
        settings: RelevanceSettings,
        folder: BeirFolder,
        positives: Mapping[str, list[str]],
    ):
        self.judged, self.dropped = 0, collections.Counter()
        self._judge, self._settings, self._folder, self._positives = judge, settings, folder, positives
        self._queries = texts_of_queries(folder, positives, "is judged")
        self._ceilings: dict[str, float] = {}

    @property
    def description(self) -> dict[str, object]:
        named = {"name": self._judge.spec, "fingerprint": self._judge.fingerprint}
        return named | dataclasses.asdict(self._settings)

    def keep(self, drawn: Mapping[str, Drawn]) -> dict[str, Drawn]:
        """Returns the candidates that are not dropped. Reads the texts of candidates and of new positives."""
        margin, ceiling = self._settings.relevance_margin, self._settings.max_relevance
        new = [q for q in drawn if q not in self._ceilings] if margin is not None else []
        positives = [(query_id, doc_id) for query_id in new for doc_id in self._positives[query_id]]
        candidates = [(query_id, doc_id) for query_id, some in drawn.items() for _, doc_id in some]
        relevance = self._relevance(positives + candidates)
        for (query_id, _), value in zip(positives, relevance, strict=False):
            self._ceilings[query_id] = min(self._ceilings.get(query_id, 1.0), value - margin)
        self.judged += len(candidates)
        kept: dict[str, Drawn] = {}
        values = iter(relevance[len(positives) :])
        for query_id, some in drawn.items():
            kept[query_id] = []
            for place, doc_id in some:
                value = next(values)
                if ceiling is not None and value > ceiling:
                    self.dropped[self.ABOVE] += 1
                elif margin is not None and value > self._ceilings[query_id]:
                    self.dropped[self.NEAR] += 1
                else:
                    kept[query_id].append((place, doc_id))
        return kept

    def _relevance(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        wanted = {doc_id for _, doc_id in pairs}
        documents = read_wanted(self._folder.corpus_path, wanted, named_by="the run has found")
        texts = {document.id: document.contents for document in documents}
        return self._judge.relevance([(self._queries[q], texts[d]) for q, d in pairs]).tolist()
