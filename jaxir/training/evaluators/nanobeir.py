"""The evaluator `NanoBEIR`: the mean nDCG@10 of 13 small collections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxir.core.values import checked
from jaxir.evaluation.collection import Collection
from jaxir.evaluation.nanobeir_sets import PLACE, SETS, read_nanobeir
from jaxir.training.evaluators.corpus_search import score_vectors
from jaxir.training.evaluators.evaluation_context import Bench, State, described
from jaxir.training.evaluators.evaluator import Evaluator, Prepared

METRIC = "nDCG@10"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class NanoBEIR(Evaluator):
    """`NanoBEIR`, the mean nDCG@10 of NanoBEIR's collections; each collection's is logged as `NanoBEIR/SET`.

    Each evaluation encodes all documents, some thousand of each collection. Results with a query's own id are
    kept, as in sentence-transformers' evaluator of this name.

    Attributes:
      place: where the collections are, see `evaluation.nanobeir_sets.read_nanobeir`.
      sets: the names of the collections.
    """

    metrics = {"NanoBEIR": "greater"}  # noqa: RUF012

    place: str = PLACE
    sets: list[str] = dataclasses.field(default_factory=lambda: list(SETS))

    def prepare(self, bench: Bench) -> Prepared:
        found = read_nanobeir(self.place, self.sets)
        # Compile one program for all queries and one for all documents, instead of two for each collection.
        queries = [text for c in found.values() for text in c.queries]
        documents = [text for c in found.values() for text in c.documents]
        of_queries = bench.vectors(bench.tokens(queries, "query"), "query")
        of_documents = bench.vectors(bench.tokens(documents, "passage"), "passage")
        ends = [np.cumsum([len(x) for x in texts])[:-1] for texts in _texts(found)]

        def measure(state: State) -> Mapping[str, float]:
            parts = np.split(of_queries(state), ends[0]), np.split(of_documents(state), ends[1])
            each = {
                f"NanoBEIR/{name}": score_vectors(*vectors, found[name], [METRIC], depth=10)[METRIC]
                for name, *vectors in zip(found, *parts, strict=True)
            }
            return {"NanoBEIR": float(np.mean(list(each.values())))} | each

        content = ((name, c.queries, c.documents, str(c.qrels)) for name, c in found.items())
        sizes = f"{len(queries)} queries among {len(documents)} documents"
        return Prepared(measure, described(sizes, *content))


def _texts(found: Mapping[str, Collection]) -> tuple[list[list[str]], list[list[str]]]:
    return [c.queries for c in found.values()], [c.documents for c in found.values()]
