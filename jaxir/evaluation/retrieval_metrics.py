"""Retrieval metrics of a run against relevance judgements, computed by ir_measures.

Policies for reproducible numbers: a judged query without results scores 0, and a query without judgements is
ignored. Results are ranked by score as in trec_eval: scores are compared in float32, and the greater document
id wins ties. The caller decides whether to drop documents with the query's own id; their number is reported.
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
QUESTION_METRICS = "nDCG@10 R@10 P@10 R@100"  # default for duplicate questions (BEIR; Wang 2022, eq. 4.2)
TITLE_METRICS = "CappedR@10 P@10"  # default for eProduct (Wang 2022, eq. 4.1)
# If answers decide relevance, relevant documents that no run found are unknown. So neither recall nor nDCG.
ANSWER_METRICS = "Success@1 Success@5 Success@20 Success@100"
# The providers of ir_measures that run in this process. Others (Perl, C) read files and refuse some ids.
# The provider "accuracy" is left out because it skips different queries for each system.
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
    """A metric, parsed from a name such as "nDCG@10"."""

    measure: ir_measures.Measure
    capped: int | None = None  # the k of CappedR@k, which is computed from the `measure` P@k; else None

    @property
    def depth(self) -> int:
        """The metric's cutoff, the number of results per query that it uses; 0 if it uses all."""
        return self.measure.params.get("cutoff", 0)

    def of_query(self, value: float, judged: Mapping[str, int]) -> float:
        """Returns a query's value of the metric, given its value of `measure` and its judgements."""
        if self.capped is None:
            return value
        # Wang 2022, eq. 4.1: CappedR@k = (relevant documents found) / min(k, number of relevant documents).
        relevant = sum(relevance > 0 for relevance in judged.values())
        return value * self.capped / min(self.capped, relevant) if relevant else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalScores:
    """The scores of a run.

    Attributes:
      values: {metric, as the caller spelt it: its aggregate over all judged queries}.
      per_query: {metric: {query id: value}}, in the order of the judgements.
      queries: the number of judged queries.
      unanswered: the number of judged queries for which the run has no results; each scores 0.
      unjudged: the number of queries of the run without judgements, which are ignored.
      identical_ids: whether results with their query's own id were kept ("keep") or dropped ("drop").
      identical: the number of results with their query's own id.
      cut_at: the maximum number of results per query, if it is below a metric's cutoff and below the number
        of documents in the run; else None.
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
        """Returns one line that describes the scored queries, for a table's caption."""
        parts = [f"{self.queries} judged queries"]
        if self.unanswered:
            parts.append(f"judged queries without results, which score 0: {self.unanswered}")
        if self.unjudged:
            parts.append(f"queries without judgements, which are ignored: {self.unjudged}")
        done = "kept" if self.identical_ids == "keep" else "dropped"
        parts.append(f"results with their query's own id {done} ({self.identical} found)")
        if self.cut_at is not None:
            metrics = parse_metrics(list(self.values)).items()
            deeper = ", ".join(name for name, metric in metrics if metric.depth > self.cut_at)
            parts.append(
                f"no query has more than {self.cut_at} results, so deeper ranks are empty for {deeper}"
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
    """Scores a run with relevance judgements.

    Args:
      run: {query id: {document id: score}}.
      qrels: {query id: {document id: relevance}}; 0 or less is not relevant.
      metrics: names as in ir_measures ("nDCG@10 RR@10 P@1 R@100 AP", "RR(rel=2)@10"), in upper or lower
        case, with the usual synonyms (MRR, MAP, Recall, Precision, Hit); and CappedR@k, which divides by at
        most k relevant documents (Wang 2022, eq. 4.1).
      identical_ids: "drop" removes the document with the query's own id from its results, as BEIR's scripts
        do; "keep" keeps it, for collections in which queries and documents are numbered independently.
      depth: the number of results per query that are scored, after `identical_ids`; None: all.

    Raises:
      UserError: an unknown metric, no judgements, or a run without results for any judged query.
    """
    wanted = parse_metrics(metrics)
    if not qrels:
        raise UserError("there are no relevance judgements to evaluate with: check the file of judgements")
    judged = {query_id: answers for query_id, answers in run.items() if query_id in qrels and answers}
    if not judged:
        raise UserError(
            "the run has no results for any judged query: check that run and qrels use the same query ids"
        )
    identical = sum(query_id in answers for query_id, answers in judged.items())
    ranked = {}
    for query_id, answers in judged.items():
        own = query_id if identical_ids == "drop" else None
        order = rank({doc_id: score for doc_id, score in answers.items() if doc_id != own})[:depth]
        # Replace scores by distinct numbers in rank order: providers of ir_measures break ties differently.
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
    """Returns the maximum number of results per query; infinity if a query has every document of the run."""
    most = max(map(len, run.values()))
    return most if most < len(set().union(*run.values())) else math.inf


def check_depth(metrics: str | Sequence[str], depth: int) -> None:
    """Raises a UserError if a metric's cutoff is above `depth`, the number of results per query."""
    for name, metric in parse_metrics(metrics).items():
        if metric.depth > depth:
            raise UserError(
                f"{name} needs {metric.depth} results per query, but depth is {depth}: set --depth to"
                f" {metric.depth} or more"
            )


def parse_metrics(metrics: str | Sequence[str]) -> dict[str, Metric]:
    """Returns {name, as the caller spelt it: metric} for names in a list or separated by spaces."""
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
            raise ValueError("a cutoff must be at least 1")
    except (ValueError, TypeError, KeyError, AssertionError, RuntimeError) as error:
        examples = "nDCG@10, RR, R@100 or RR(rel=2)@10"
        raise UserError(f"metric {text!r} cannot be computed; write it like {examples}") from error
    return Metric(measure)
