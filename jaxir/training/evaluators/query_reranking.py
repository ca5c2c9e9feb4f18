"""The evaluator `QueryReranking`: the rank of answers for the queries that a query reranker (EAR) chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Object, checked
from jaxir.data.expanded.candidates import QueryCandidates
from jaxir.data.formats.lines import OnBadInput
from jaxir.objectives.query_reranking import query_features, score_candidates
from jaxir.training.evaluators.evaluation_context import Bench, State
from jaxir.training.evaluators.evaluator import Evaluator, Prepared

CUTS = (1, 5, 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class QueryReranking(Evaluator):
    """Success@k and mean rank of the answer, if each question uses the candidate query with the best score.

    Success@k is the share of questions whose chosen query finds an answer among its first k passages: the
    top-k accuracy of Chuang 2024, chapter 3. A query that finds no answer has the rank `data.max_rank`.

    Attributes:
      data: the candidates, a `data.expanded.candidates.QueryCandidates`; all of them are scored.
    """

    metrics = {f"Success@{k}": "greater" for k in CUTS} | {"mean_rank": "smaller"}

    data: Object | None

    def prepare(self, bench: Bench) -> Prepared:
        if not isinstance(self.data, QueryCandidates):
            raise UserError("QueryReranking needs a QueryCandidates as data: set DEV_CANDIDATES to a file")
        # `bench.examples` below reports the number of skipped records.
        questions = list(self.data.questions(OnBadInput(bench.on_bad_input)))
        if (depth := min((some.depth for some in questions), default=max(CUTS))) < max(CUTS):
            raise UserError(
                f"{self.data.path}: Success@{max(CUTS)} needs candidates searched to depth {max(CUTS)}, not"
                f" {depth}: run jaxir.expand retrieve --depth={max(CUTS)}, or more"
            )
        count = max((len(some.outputs) for some in questions), default=1)
        examples = bench.examples(self.data, query_features(bench.form, count), drawn=True)
        ranks = examples.arrays["ranks"]

        def scores_of(model: Any, _: Any, batch: Mapping[str, Any]) -> Any:
            return score_candidates(model, batch)

        program = bench.program(scores_of, {n: x for n, x in examples.arrays.items() if n.endswith("_ids")})

        def measure(state: State) -> Mapping[str, float]:
            scores = program.of_rows(state)
            # In shorter lists, candidates are repeated with equal scores and ranks; the choice is the same.
            chosen = np.take_along_axis(ranks, scores.argmax(1)[:, None], axis=1)
            found = {f"Success@{k}": float((chosen <= k).mean()) for k in CUTS}
            return found | {"mean_rank": float(chosen.mean())}

        return Prepared(measure, examples.fingerprint)
