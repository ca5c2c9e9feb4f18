"""Search in a test collection: any retrieval metric, of the documents and queries that a folder has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxir.data import fingerprints
from jaxir.data.tokenizer import pad_batch
from jaxir.evaluation.collection import search_vectors
from jaxir.evaluation.datasets import parse_dataset
from jaxir.evaluation.question_sets import COLLECTIONS
from jaxir.evaluation.retrieval import IdenticalIds, evaluate_run, parse_metrics
from jaxir.evaluators.bench import Bench, State
from jaxir.evaluators.evaluator import Direction, Evaluator, Prepared
from jaxir.simple_types import Count, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Search(Evaluator):
    """What `jaxir.evaluate --dataset=` says of the model: each judged query is searched among all documents.

    All of them are encoded at each evaluation: `jaxir.sample` makes a large collection smaller.

    Attributes:
      dataset: beir:DIR, quora:DIR or eproduct:DIR, or a BEIR folder.
      split: its judgements.
      wanted: the metrics, separated by spaces, as ir_measures spells them.
      identical_ids: "keep" or "drop" answers that have their query's own id.
      depth: answers of a query.
    """

    dataset: str
    split: str = "dev"
    wanted: str = "R@10 P@10"
    identical_ids: IdenticalIds = "keep"
    depth: Count = 1000

    @property
    def metrics(self) -> dict[str, Direction]:
        """Those that are wanted."""
        return dict.fromkeys(parse_metrics(self.wanted), "greater")

    def prepare(self, bench: Bench) -> Prepared:
        """Reads the collection; see `Evaluator`.

        Raises:
          UserError: it is not there, or has no such split.
        """
        kind, path = parse_dataset(self.dataset, *COLLECTIONS, what="dataset")
        collection, form = COLLECTIONS[kind](path, self.split), bench.form

        def tokens(texts: list[str], prompt: str, length: int) -> np.ndarray:
            ids = bench.tokenizer.encode_batch([prompt + text for text in texts], max_length=length)
            return pad_batch(ids, length)

        queries = tokens(collection.queries, form.query_prompt, form.query_length)
        documents = tokens(collection.documents, form.passage_prompt, form.passage_length)
        of_queries, of_documents = bench.vectors(queries, "query"), bench.vectors(documents, "passage")
        depth = self.depth + (self.identical_ids == "drop")

        def measure(state: State) -> Mapping[str, float]:
            # Vectors are as the model's similarity wants them, so the inner product is it.
            found = of_queries(state), of_documents(state)
            run = search_vectors(*found, collection, similarity="dot", depth=depth)
            how = {"identical_ids": self.identical_ids}
            return evaluate_run(run, collection.qrels, list(self.metrics), **how).values

        told = fingerprints.of_values(
            *collection.queries,
            *collection.documents,
            *map(str, collection.qrels.items()),
            self.identical_ids,
        )
        sizes = f"{len(collection.queries)} queries among {len(collection.documents)} documents"
        return Prepared(measure, f"{sizes}, hash {told[: fingerprints.DIGITS]}")
