"""Command: fuses runs into one, or rescores one by another's scores."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, Literal

from jaxir import cli
from jaxir.core.choices import Rules, settings_of, with_flags_of
from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.core.values import Count, Natural, checked
from jaxir.data.formats.lines import as_number
from jaxir.retrieval.ranking import fusion
from jaxir.retrieval.ranking.runs import Run, read_run, write_run
from jaxir.storage.outputs import writes


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ReciprocalRanks:
    """Settings of --method=rrf.

    Attributes:
      constant: for rrf, the number that is added to each rank.
    """

    constant: Natural = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Alphas:
    """The weight of a second run, given or found by a sweep.

    Attributes:
      alpha: weight for rescore: first + alpha * second; for interpolate with two runs: (1 - alpha) * first +
        alpha * second.
      sweep: alphas to try, separated by commas.
      qrels: judgements for --sweep, of another split than the one to test on.
      metric: the metric that --sweep maximises (default: nDCG@10).
    """

    alpha: float | None = None
    sweep: list[str] | None = None
    qrels: str | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        if (self.sweep is None) != (self.qrels is None):
            raise UserError("give --sweep and --qrels together: the alphas are compared by the judgements")
        if self.alpha is not None and self.sweep is not None:
            raise UserError("give --alpha or --sweep, not both")
        if self.metric is not None and self.sweep is None:
            raise UserError("--metric only applies to --sweep: leave it out")

    @property
    def all_(self) -> list[float]:
        """The alphas to try; empty if no second run is weighted."""
        return _numbers("sweep", self.sweep) or ([] if self.alpha is None else [self.alpha])


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Interpolation(Alphas):
    """Settings of --method=interpolate.

    Attributes:
      weights: for interpolate, one weight for each run (default: equal weights).
      normalization: for interpolate, how scores are normalized within each query and run.
    """

    weights: list[str] | None = None
    normalization: Literal["min_max", "z_score", "none"] = "min_max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is None:
            return
        if self.all_:
            raise UserError("give one of --alpha, --sweep and --weights")
        if not any(_numbers("weights", self.weights)):
            weights = ",".join(self.weights)
            raise UserError(
                f"--weights are all 0 ({weights}): every document would score the same; give one above 0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Rescoring(Alphas):
    """Settings of --method=rescore.

    Attributes:
      embeddings: directory of jaxir.encode; rescore computes second scores for the documents of one run.
      queries: queries.jsonl[.gz] of the run, for --embeddings.
      model: the model that encodes those queries (default: the one that made the embeddings).
    """

    embeddings: str | None = None
    queries: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.all_:
            raise UserError("rescore needs --alpha, or --sweep and --qrels to find one")
        if (self.embeddings is None) != (self.queries is None):
            raise UserError("give --embeddings and --queries together")
        if self.model is not None and self.embeddings is None:
            raise UserError("--model only applies to --embeddings: leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundRobin:
    """Settings of --method=round_robin, which has none."""


METHODS = {
    "--method=rrf": ReciprocalRanks,
    "--method=interpolate": Interpolation,
    "--method=rescore": Rescoring,
    "--method=round_robin": RoundRobin,
}


@Rules(also_called={"runs": "run", "depth": "k"})
@writes(output="run file")
@with_flags_of(*METHODS.values())
def fuse(
    *,
    runs: list[str],
    method: Literal["rrf", "interpolate", "rescore", "round_robin"],
    output: str,
    depth: Count = 1000,
    **given: Any,
) -> None:
    """Fuses runs into one.

    rrf adds 1 / (constant + rank). interpolate adds weighted, normalised scores. rescore adds alpha times a
    second run's scores to the first run's, for the first run's documents only. round_robin takes the best
    documents of the runs in turns. --sweep tries several alphas on the judgements of --qrels, prints a table
    and writes the best run. Documents with equal scores are ordered by descending id.

    Args:
      runs: TREC run files; the order matters.
      method: how the runs are fused.
      output: the run file to write.
      depth: documents kept, and rescored, per query.
    """
    settings = settings_of(METHODS, f"--method={method}", given)
    _check_count(runs, settings)
    metric = _one_metric(settings) if isinstance(settings, Alphas) else ""
    read = [read_run(path) for path in runs]
    for odd in fusion.oddities(dict(zip(runs, read, strict=True))):
        print(f"warning: {odd}", file=sys.stderr)
    if isinstance(settings, Rescoring) and settings.embeddings is not None:
        read.append(_dense_run(read[0], settings, depth))
    alphas = settings.all_ if isinstance(settings, Alphas) else []
    fused = functools.partial(_fused, read, settings, depth)
    result = fused(*alphas) if len(alphas) < 2 else _best(fused, alphas, settings.qrels, metric)
    write_run(output, result)
    print(f"{output}: {len(result):,} queries, {sum(map(len, result.values())):,} answers")


def _check_count(runs: list[str], settings: Any) -> None:
    """Checks the number of runs that a method takes; fusion itself requires two or more."""
    if isinstance(settings, Rescoring) and len(runs) != (1 if settings.embeddings is not None else 2):
        raise UserError(
            f"rescore takes two runs, or one and --embeddings with --queries; there are {len(runs)}"
            f" run{'s' if len(runs) > 1 else ''}"
        )
    if isinstance(settings, Interpolation) and settings.all_ and len(runs) != 2:
        raise UserError(f"with --alpha or --sweep, interpolate takes two runs, not {len(runs)}")


def _fused(runs: list[Run], settings: Any, depth: int, alpha: float | None = None) -> Run:
    match settings:
        case ReciprocalRanks(constant=constant):
            return fusion.reciprocal_rank_fusion(runs, constant=constant, depth=depth)
        case RoundRobin():
            return fusion.round_robin(runs, depth=depth)
        case Rescoring():
            return fusion.rescore(*runs, alpha=alpha, depth=depth)
    weights = [1 - alpha, alpha] if alpha is not None else _numbers("weights", settings.weights)
    return fusion.interpolate(runs, weights=weights, normalization=settings.normalization, depth=depth)


def _numbers(flag: str, values: list[str] | None) -> list[float] | None:
    numbers = values if values is None else [as_number(value.strip()) for value in values]
    if numbers is not None and None in numbers:
        raise UserError(f"--{flag} must be numbers separated by commas, not {','.join(values)}")
    return numbers


def _one_metric(settings: Alphas) -> str:
    from jaxir.evaluation.retrieval_metrics import parse_metrics

    text = settings.metric or "nDCG@10"
    if len(metrics := list(parse_metrics(text))) > 1:
        raise UserError(f"--metric must be one metric, which chooses the best alpha, not {text!r}")
    return metrics[0]


def _dense_run(first: Run, settings: Rescoring, depth: int) -> Run:
    from jaxir.data.formats.sources import read_queries
    from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
    from jaxir.retrieval.encoding.text_encoder import DualEncoder
    from jaxir.retrieval.ranking.rescoring import score_candidates

    stored = open_embeddings(settings.embeddings)
    texts = {query.id: query.text for query in read_queries(settings.queries)}
    name = settings.model or stored.info.model
    if name is None:
        raise UserError(f"{settings.embeddings} does not name the model that made it: give --model")
    encoder = DualEncoder.load(name, weights=stored.info.weights)
    return score_candidates(first, queries=texts, embeddings=stored, encoder=encoder, depth=depth)


def _best(fused: Callable[[float], Run], alphas: list[float], qrels: str, metric: str) -> Run:
    """Prints the score of each alpha and returns the best run, the first of equally good ones."""
    from jaxir.evaluation.judgements import read_judgements
    from jaxir.evaluation.retrieval_metrics import evaluate_run
    from jaxir.evaluation.text_tables import format_table

    judgements = read_judgements(qrels)
    values: dict[float, float] = {}
    best: Run = {}
    for alpha in progress(alphas, what="alphas", unit="alphas"):
        run = fused(alpha)
        scores = evaluate_run(run, judgements, metric)
        if scores.values[metric] > max(values.values(), default=-math.inf):
            best = run
        values[alpha] = scores.values[metric]
    print(f"judgements: {qrels}; {scores.describe()}\n")
    print(format_table(["alpha", metric], [[f"{alpha:g}", value] for alpha, value in values.items()]))
    print(f"\nbest alpha: {max(values, key=values.__getitem__):g}")
    return best


if __name__ == "__main__":
    cli.start("jaxir.fuse:fuse", "--runs=bm25.trec,dense.trec --method=rrf --output=hybrid.trec")
