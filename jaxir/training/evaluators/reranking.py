"""The evaluator `Reranking`: how well a reranker orders the documents that a retriever found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Within, checked
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.retrieval_metrics import cut_at, evaluate_run
from jaxir.objectives.reranking import score_lists
from jaxir.retrieval.ranking.run_reranking import read_candidates
from jaxir.retrieval.ranking.runs import read_run
from jaxir.training.evaluators.evaluation_context import Bench, State, described
from jaxir.training.evaluators.evaluator import Evaluator, Prepared

WANTED = 10  # minimum number of documents per query, needed by nDCG@10 and RR@10


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Reranking(Evaluator):
    """nDCG@10 and RR@10 of a run file's best documents, ordered by the model's scores.

    The model is a cross-encoder, or a multi-vector encoder, which scores by MaxSim.

    Relevant documents that the run lacks lower the metrics. Queries and documents are truncated separately,
    as in training; `jaxir.rerank` truncates the longer text of a pair.

    Attributes:
      directory: a BEIR folder.
      run: TREC run file of any retriever, with queries of the split.
      split: the split of the folder whose judgements are used.
      depth: number of documents read from the run per query, at least ten.
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
            raise UserError(f"{self.run} has no query of {folder.qrels_path(self.split)}: give another run")
        if (most := cut_at(run)) < WANTED:
            raise UserError(
                f"{self.run} has at most {most} documents per query, but {' and '.join(self.metrics)} need"
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
            if hasattr(model, "token_vectors"):
                return model.score_lists(batch["query_ids"], batch["passage_ids"])
            if not hasattr(model, "score_texts"):
                raise UserError(
                    "Reranking evaluates cross-encoders and multi-vector encoders, not this model: use Search"
                )
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
