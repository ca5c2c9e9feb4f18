"""Reranking: how well a cross-encoder orders a retriever's answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Within, checked
from jaxir.data.formats.sources import BeirFolder
from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.retrieval_metrics import cut_at, evaluate_run
from jaxir.objectives.reranking import score_lists
from jaxir.retrieval.ranking.run_reranking import read_candidates
from jaxir.retrieval.ranking.runs import read_run
from jaxir.training.evaluators.evaluation_context import Bench, State, described
from jaxir.training.evaluators.evaluator import Evaluator, Prepared

WANTED = 10  # documents of a query that the metrics need


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Reranking(Evaluator):
    """nDCG@10 and RR@10 of a run's best documents in the order of the model's scores.

    Documents that the run did not find count as missed. Texts are cut one by one, as in training;
    `jaxir.rerank` cuts the longer one of a pair.

    Attributes:
      directory: a BEIR folder.
      run: TREC run file over queries of the split, of any retriever.
      split: the judgements.
      depth: documents of a query that are read; the metrics need ten.
    """

    metrics = {"nDCG@10": "greater", "RR@10": "greater"}  # noqa: RUF012

    directory: str
    run: str
    split: str = "dev"
    depth: Annotated[int, Within(WANTED)] = 20

    def prepare(self, bench: Bench) -> Prepared:
        folder = BeirFolder(self.directory)
        judgements = read_judgements(folder.qrels_path(self.split))
        run = {query_id: some for query_id, some in read_run(self.run).items() if query_id in judgements}
        if not run:
            raise UserError(f"{self.run} has none of the queries that {folder.qrels_path(self.split)} judges")
        if (most := cut_at(run)) < WANTED:
            raise UserError(
                f"{self.run} has at most {most} documents of a query, and {' and '.join(self.metrics)} need"
                f" {WANTED}: search with a larger k"
            )
        candidates = read_candidates(run, folder, depth=self.depth)
        queries = [candidates.queries[query_id] for query_id in candidates.found]
        texts = list(candidates.documents.values())
        documents = bench.tokens(texts, "passage")
        row_of = {doc_id: row for row, doc_id in enumerate(candidates.documents)}
        depth = max(map(len, candidates.found.values()))
        lists = np.zeros((len(queries), depth, documents.shape[1]), np.int32)
        for place, some in zip(lists, candidates.found.values(), strict=True):
            place[: len(some)] = documents[[row_of[doc_id] for doc_id in some]]
        rows = {"query_ids": bench.tokens(queries, "query"), "passage_ids": lists}

        def scores_of(model: Any, _: Any, batch: Mapping[str, Any]) -> Any:
            if not hasattr(model, "score_texts"):
                raise UserError("Reranking measures cross-encoders, and this model makes vectors")
            return score_lists(model, batch["query_ids"], batch["passage_ids"])

        program = bench.program(scores_of, rows)

        def measure(state: State) -> Mapping[str, float]:
            scores = program.of_rows(state)
            reranked = {
                query_id: dict(zip(some, map(float, row), strict=False))
                for (query_id, some), row in zip(candidates.found.items(), scores, strict=True)
            }
            return evaluate_run(reranked, judgements, list(self.metrics)).values

        found = (tuple(some) for some in candidates.found.values())
        judged = (f"{query_id} {sorted(judgements[query_id].items())}" for query_id in candidates.found)
        prompted = (
            *(bench.form.query_prompt + text for text in queries),
            *(bench.form.passage_prompt + text for text in texts),
        )
        return Prepared(measure, described(f"{len(queries)} queries", *found, *prompted, *judged))
