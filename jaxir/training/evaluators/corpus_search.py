"""The evaluator `Search`: any retrieval metric on the documents and queries of a test collection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from jaxir.core.values import Count, checked
from jaxir.evaluation.collection import Collection, search_vectors
from jaxir.evaluation.datasets import parse_dataset
from jaxir.evaluation.question_sets import COLLECTIONS, read_cqadupstack
from jaxir.evaluation.retrieval_metrics import IdenticalIds, check_depth, evaluate_run, parse_metrics
from jaxir.training.evaluators.evaluation_context import Bench, State, described
from jaxir.training.evaluators.evaluator import Direction, Evaluator, Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Search(Evaluator):
    """Searches each judged query among all documents; the metrics are those of `jaxir.evaluate --dataset=`.

    Each evaluation encodes all documents; `jaxir.sample` makes a large collection smaller. For CQADupStack,
    metrics are means over its forums, and each forum's metrics are logged as `METRIC/FORUM`.

    Attributes:
      dataset: beir:DIR, quora:DIR, cqadupstack:DIR or eproduct:DIR, or a BEIR folder.
      split: the split of the dataset whose queries and judgements are used.
      wanted: the metrics, separated by spaces, as ir_measures spells them.
      identical_ids: "keep" or "drop" found documents whose id is that of their query.
      depth: documents found per query; a metric with a higher cutoff is an error.
    """

    dataset: str
    split: str = "dev"
    wanted: str = "R@10 P@10"
    identical_ids: IdenticalIds = "keep"
    depth: Count = 1000

    def __post_init__(self):
        check_depth(self.wanted, self.depth)

    @property
    def metrics(self) -> dict[str, Direction]:
        return dict.fromkeys(parse_metrics(self.wanted), "greater")

    def prepare(self, bench: Bench) -> Prepared:
        kind, path = parse_dataset(self.dataset, *COLLECTIONS, "cqadupstack", what="dataset")
        several = kind == "cqadupstack"
        found = read_cqadupstack(path, self.split) if several else {"": COLLECTIONS[kind](path, self.split)}
        searches = {name: self._search(bench, collection) for name, collection in found.items()}

        def measure(state: State) -> Mapping[str, float]:
            each = {name: search(state) for name, search in searches.items()}
            means = {metric: float(np.mean([x[metric] for x in each.values()])) for metric in self.metrics}
            apart = {f"{metric}/{name}": x for name in each for metric, x in each[name].items()}
            return means | (apart if several else {})

        queries = sum(len(c.queries) for c in found.values())
        documents = sum(len(c.documents) for c in found.values())
        texts = ((c.queries, c.documents, str(c.qrels)) for c in found.values())
        sizes = f"{queries} queries among {documents} documents"
        return Prepared(measure, described(sizes, *texts, self.identical_ids, self.depth))

    def _search(self, bench: Bench, collection: Collection) -> Callable[[State], Mapping[str, float]]:
        """Returns a function that maps a state to the metrics on a collection."""
        of_queries = bench.vectors(bench.tokens(collection.queries, "query"), "query")
        of_documents = bench.vectors(bench.tokens(collection.documents, "passage"), "passage")
        how = {"depth": self.depth, "identical_ids": self.identical_ids}

        def measure(state: State) -> Mapping[str, float]:
            vectors = of_queries(state), of_documents(state)
            return score_vectors(*vectors, collection, list(self.metrics), **how)

        return measure


def score_vectors(
    queries: np.ndarray,
    documents: np.ndarray,
    collection: Collection,
    metrics: list[str],
    *,
    depth: int,
    identical_ids: IdenticalIds = "keep",
) -> Mapping[str, float]:
    """Returns the metrics of a search with vectors of a collection's queries [Q, D] and documents [N, D].

    Vectors of models with cosine similarity are normalised, so inner products are right for all models.
    """
    deeper = depth + (identical_ids == "drop")
    run = search_vectors(queries, documents, collection, similarity="dot", depth=deeper)
    return evaluate_run(run, collection.qrels, metrics, identical_ids=identical_ids, depth=depth).values
