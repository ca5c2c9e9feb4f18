"""Retrieval metrics of a run against relevance judgements, computed by ir_measures.

Policies, so that a number can be repeated: a judged query without answers counts 0 and a query without
judgements is ignored; answers are ranked by score as trec_eval does (scores are compared in float32, ties go
to the greater document id); whether a document with its query's own id may be an answer is for the caller to
say and is reported.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import ir_measures

from jaxir.core.errors import UserError, suggest
from jaxir.retrieval.ranking.runs import rank

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, int]]
IdenticalIds = Literal["keep", "drop"]

DEFAULT_METRICS = "nDCG@10 RR@10 P@1 R@100"
QUESTION_METRICS = "nDCG@10 R@10 P@10 R@100"  # of duplicate questions (BEIR; Wang 2022, eq. 4.2)
TITLE_METRICS = "CappedR@10 P@10"  # of eProduct (Wang 2022, eq. 4.1)
# Of answers: what is right and was not found is not known, so recall and nDCG would be of what was found.
ANSWER_METRICS = "Success@1 Success@5 Success@20 Success@100"
# ir_measures' programs that run in this process; the others (Perl, C) read files and refuse some ids. Its
# accuracy leaves out queries, of each system others.
PROGRAMS = ir_measures.providers.FallbackProvider(
    [
        ir_measures.pytrec_eval,
        ir_measures.compat,
        ir_measures.judged,
        ir_measures.msmarco,
    ]
)
ALIASES = {"hit": "Success", "hits": "Success", "mrr": "RR", "map": "AP"}
CAPPED = re.compile(r"(?:CappedR|capped_?recall|R_?cap)@(\d+)", re.IGNORECASE)


class Metric(NamedTuple):
    """What a name means.

    Attributes:
      measure: of ir_measures.
      capped: None, or the k of capped recall, for which `measure` is P@k.
    """

    measure: ir_measures.Measure
    capped: int | None = None

    @property
    def depth(self) -> int:
        """The answers of a query that it is of; 0 where it is of all that there are."""
        return self.measure.params.get("cutoff", 0)

    def of_query(self, value: float, judged: Mapping[str, int]) -> float:
        """Returns the metric of a query from the measure's value and the query's judgements."""
        if self.capped is None:
            return value
        # Wang 2022, eq. 4.1: what was found over min(k, relevant); P@k is what was found over k.
        relevant = sum(relevance > 0 for relevance in judged.values())
        return value * self.capped / min(self.capped, relevant) if relevant else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalScores:
    """What a run scored.

    Attributes:
      values: metric, as the caller spelt it, to its aggregate over all judged queries.
      per_query: metric to query id to value, in the order of the judgements.
      queries: the number of judged queries.
      unanswered: judged queries without answers; each counts 0.
      unjudged: queries of the run without judgements; they are ignored.
      identical_ids: "keep" or "drop", what was done with documents that have their query's id.
      identical: how many such answers the run had.
      cut_at: the most answers of a query, where a metric is of more and the run has other documents besides;
        None elsewhere.
    """

    values: dict[str, float]
    per_query: dict[str, dict[str, float]]
    queries: int
    unanswered: int
    unjudged: int
    identical_ids: IdenticalIds
    identical: int
    cut_at: int | None = None

    def describe(self) -> str:
        """Says in one line what the values are over."""
        parts = [f"{self.queries} judged queries"]
        if self.unanswered:
            parts.append(f"of them without answers, counting 0: {self.unanswered}")
        if self.unjudged:
            parts.append(f"queries without judgements ignored: {self.unjudged}")
        done = "kept" if self.identical_ids == "keep" else "dropped"
        parts.append(f"answers with their query's own id {done} ({self.identical} found)")
        if self.cut_at is not None:
            metrics = parse_metrics(list(self.values)).items()
            deeper = ", ".join(name for name, metric in metrics if metric.depth > self.cut_at)
            parts.append(
                f"no query has more than {self.cut_at} answers: to {deeper} what would follow is not found"
            )
        return "; ".join(parts)


def evaluate_run(
    run: Run,
    qrels: Qrels,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    *,
    identical_ids: IdenticalIds = "keep",
    depth: int | None = None,
) -> RetrievalScores:
    """Scores a run.

    Args:
      run: query id to document id to score.
      qrels: query id to document id to relevance; 0 or less is not relevant.
      metrics: names as ir_measures spells them ("nDCG@10 RR@10 P@1 R@100 AP", "RR(rel=2)@10"), upper or lower
        case, with the usual synonyms (MRR, MAP, Recall, Precision, Hit); and CappedR@k, recall over at most k
        relevant documents (Wang 2022, eq. 4.1).
      identical_ids: "drop" removes the document with the query's own id from its answers, as the BEIR scripts
        do; "keep" leaves it (collections where both are numbered from 1 need that).
      depth: how many answers of a query count, of those that are left; None: all.

    Raises:
      UserError: an unknown metric, no judgements, or a run that answers none of the judged queries.
    """
    wanted = parse_metrics(metrics)
    if not qrels:
        raise UserError("there are no relevance judgements to evaluate against")
    judged = {query_id: answers for query_id, answers in run.items() if query_id in qrels and answers}
    if not judged:
        raise UserError("the run answers none of the judged queries: do run and qrels belong together?")
    identical = sum(query_id in answers for query_id, answers in judged.items())
    ranked = {}
    for query_id, answers in judged.items():
        own = query_id if identical_ids == "drop" else None
        order = rank({doc_id: score for doc_id, score in answers.items() if doc_id != own})[:depth]
        # ir_measures passes the run to programs that break ties differently; ranks as scores leave them none.
        if order:
            ranked[query_id] = {doc_id: float(len(order) - place) for place, doc_id in enumerate(order)}
    judgements = {query_id: dict(docs) for query_id, docs in qrels.items()}
    measures = {metric.measure for metric in wanted.values()}
    result = PROGRAMS.calc(measures, judgements, ranked)
    found = {(m.measure, m.query_id): float(m.value) for m in result.per_query}
    per_query = {
        name: {q: metric.of_query(found[metric.measure, q], docs) for q, docs in qrels.items()}
        for name, metric in wanted.items()
    }
    most = min(cut_at(judged), math.inf if depth is None else depth)
    return RetrievalScores(
        values={
            name: float(result.aggregated[metric.measure])
            if metric.capped is None
            else statistics.fmean(per_query[name].values())
            for name, metric in wanted.items()
        },
        per_query=per_query,
        queries=len(qrels),
        unanswered=len(qrels) - len(ranked),
        unjudged=sum(query_id not in qrels for query_id in run),
        identical_ids=identical_ids,
        identical=identical,
        cut_at=most if any(metric.depth > most for metric in wanted.values()) else None,
    )


def cut_at(run: Run) -> int | float:
    """Returns at how many answers of a query a run ends; infinity where one has all that any query has."""
    most = max(map(len, run.values()))
    return most if most < len(set().union(*run.values())) else math.inf


def check_depth(metrics: str | Sequence[str], depth: int) -> None:
    """Checks that no metric is of more answers than the `depth` that a query will have.

    Raises:
      UserError: an unknown metric, or one beyond `depth`.
    """
    for name, metric in parse_metrics(metrics).items():
        if metric.depth > depth:
            raise UserError(
                f"{name} is of {metric.depth} answers, and a query has {depth}: set depth to {metric.depth}"
            )


def parse_metrics(metrics: str | Sequence[str]) -> dict[str, Metric]:
    """Returns, for each name as given, what it means.

    Raises:
      UserError: no metric, or a name or parameter that ir_measures does not know.
    """
    if isinstance(metrics, str):
        metrics = re.findall(r"[^\s,(]+(?:\([^)]*\))?[^\s,]*", metrics)
    if not metrics:
        raise UserError(f'no metric given; write for example --metrics="{DEFAULT_METRICS}"')
    return {name: _parse_metric(name) for name in metrics}


def _parse_metric(text: str) -> Metric:
    registry = ir_measures.measures.registry
    if (capped := CAPPED.fullmatch(text)) and int(capped[1]):
        return Metric(ir_measures.P @ int(capped[1]), int(capped[1]))
    name, rest = re.match(r"(\w*)(.*)", text, re.DOTALL).groups()
    if name not in registry:
        lower = {known.lower(): known for known in registry} | ALIASES
        if name.lower() not in lower:
            raise UserError(f"there is no metric {text!r}{suggest(name, [*registry, 'CappedR'])}")
        name = lower[name.lower()]
    try:
        measure = ir_measures.parse_measure(name + rest)
        PROGRAMS.evaluator([measure], {"q": {"d": 1}})
        if measure.params.get("cutoff", 1) < 1:
            raise ValueError("a cutoff is at least 1")
    except (ValueError, TypeError, KeyError, AssertionError, RuntimeError) as error:
        examples = "nDCG@10, RR, R@100 or RR(rel=2)@10"
        raise UserError(f"metric {text!r} cannot be computed; write it like {examples}") from error
    return Metric(measure)
