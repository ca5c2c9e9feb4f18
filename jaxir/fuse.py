"""Command: fuses runs into one, or rescores one by another's scores."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Literal

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.core.values import Count, Natural, check_idle
from jaxir.data.formats.lines import as_number
from jaxir.retrieval.ranking.runs import Run, read_run, write_run
from jaxir.storage.outputs import writes


@cli.also_called(runs="run", depth="k")
@writes(output="run file")
def fuse(
    *,
    runs: list[str],
    method: Literal["rrf", "interpolate", "rescore", "round_robin"],
    output: str,
    constant: Natural = 60,
    weights: list[str] | None = None,
    normalization: Literal["min_max", "z_score", "none"] = "min_max",
    alpha: float | None = None,
    sweep: list[str] | None = None,
    qrels: str | None = None,
    metric: str = "nDCG@10",
    embeddings: str | None = None,
    queries: str | None = None,
    model: str | None = None,
    depth: Count = 1000,
) -> None:
    """Fuses runs into one.

    rrf adds 1 / (constant + rank); interpolate adds weighted, normalised scores; rescore adds to the first
    run's scores alpha times a second's, for the first run's documents only; round_robin takes the best
    documents of the runs in turns. With --sweep several alphas are tried on the judgements of --qrels, a
    table is printed and the best one is written. Of equal scores the greater document id comes first.

    Args:
      runs: TREC run files, the first one in front.
      method: how.
      output: the run file to write.
      constant: of rrf.
      weights: of interpolate, one for each run; equal by default.
      normalization: of interpolate, within each query and run.
      alpha: of rescore: score = first + alpha * second; of interpolate with two runs: (1 - alpha) * first +
        alpha * second.
      sweep: alphas to try.
      qrels: judgements for --sweep, of a split that is not tested on.
      metric: what --sweep compares by.
      embeddings: EMB_DIR that gives rescore the second scores, of every document of the one run.
      queries: queries.jsonl[.gz] of the run, for --embeddings.
      model: encodes those queries (default: the one that made the embeddings).
      depth: answers of a query to keep, and to rescore.

    Raises:
      UserError: flags that do not go together, unreadable, malformed or empty files, a run that has no query
        in common with the others, or a second run that does not score all documents to be rescored.
    """
    from jaxir.retrieval.ranking import fusion

    alphas = _alphas(method, alpha=alpha, sweep=sweep, weights=weights, qrels=qrels, runs=runs)
    if method != "rrf":
        check_idle(fuse, "--method=rrf", constant=constant)
    if method != "interpolate":
        check_idle(fuse, "--method=interpolate", normalization=normalization)
    if sweep is None:
        check_idle(fuse, "--sweep", metric=metric)
    if (embeddings is not None or queries is not None or model is not None) and method != "rescore":
        raise UserError("--embeddings, --queries and --model are for --method=rescore")
    if (embeddings is None) != (queries is None):
        raise UserError("--embeddings and --queries go together")
    if embeddings is None:
        check_idle(fuse, "--embeddings", model=model)
    expected = {"rescore": 1 if embeddings is not None else 2}.get(method)
    if expected is not None and len(runs) != expected:
        raise UserError(
            f"rescore takes two runs, or one and --embeddings with --queries; there are {len(runs)}"
            f" run{'s' if len(runs) > 1 else ''}"
        )
    metric = metric if sweep is None else _one_metric(metric)
    given: list[Run] = [read_run(path) for path in runs]
    for odd in fusion.oddities(dict(zip(runs, given, strict=True))):
        print(f"warning: {odd}", file=sys.stderr)
    if embeddings is not None:
        given.append(_dense_run(given[0], embeddings=embeddings, queries=queries, model=model, depth=depth))

    def fused(alpha: float | None) -> Run:
        if method == "rrf":
            return fusion.reciprocal_rank_fusion(given, constant=constant, depth=depth)
        if method == "round_robin":
            return fusion.round_robin(given, depth=depth)
        if method == "rescore":
            return fusion.rescore(*given, alpha=alpha, depth=depth)
        shares = [1 - alpha, alpha] if alpha is not None else _numbers("weights", weights)
        return fusion.interpolate(given, weights=shares, normalization=normalization, depth=depth)

    result = fused(alphas[0]) if len(alphas) == 1 else _best(fused, alphas, qrels, metric)
    write_run(output, result)
    print(f"{output}: {len(result):,} queries, {sum(map(len, result.values())):,} answers")


def _alphas(
    method: str,
    *,
    alpha: float | None,
    sweep: list[str] | None,
    weights: list[str] | None,
    qrels: str | None,
    runs: list[str],
) -> list[float | None]:
    """Returns the alphas to try; [None] where the method has none."""
    if (sweep is None) != (qrels is None):
        raise UserError("--sweep and --qrels go together: alphas are compared on judgements")
    if sum(given is not None for given in (alpha, sweep, weights)) > 1:
        raise UserError("give one of --alpha, --sweep and --weights")
    has_alpha = alpha is not None or sweep is not None
    if has_alpha and method not in ("rescore", "interpolate"):
        raise UserError(f"{method} has no alpha")
    if weights is not None and method != "interpolate":
        raise UserError("--weights are for --method=interpolate")
    if alpha is not None and not math.isfinite(alpha):
        raise UserError(f"--alpha must be a finite number, not {alpha}")
    if method == "rescore" and not has_alpha:
        raise UserError("rescore needs --alpha, or --sweep and --qrels to find one")
    if method == "interpolate" and has_alpha and len(runs) != 2:
        raise UserError(f"with --alpha or --sweep, interpolate takes two runs, not {len(runs)}")
    if weights is not None and not any(_numbers("weights", weights)):
        raise UserError(f"--weights are all 0 ({','.join(weights)}): every document would score the same")
    return [alpha] if sweep is None else _numbers("sweep", sweep)


def _numbers(flag: str, values: list[str] | None) -> list[float] | None:
    numbers = values if values is None else [as_number(value.strip()) for value in values]
    if numbers is not None and None in numbers:
        raise UserError(f"--{flag} must be numbers separated by commas, not {','.join(values)}")
    return numbers


def _one_metric(text: str) -> str:
    from jaxir.evaluation.retrieval_metrics import parse_metrics

    if len(metrics := list(parse_metrics(text))) > 1:
        raise UserError(f"--metric must be one, not {text!r}: the best alpha is best by one")
    return metrics[0]


def _dense_run(first: Run, *, embeddings: str, queries: str, model: str | None, depth: int) -> Run:
    from jaxir.data.formats.sources import read_queries
    from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
    from jaxir.retrieval.encoding.text_encoder import DualEncoder
    from jaxir.retrieval.ranking.rescoring import score_candidates

    stored = open_embeddings(embeddings)
    texts = {query.id: query.text for query in read_queries(queries)}
    name = model or stored.info.model
    if name is None:
        raise UserError(f"{embeddings} does not say which model made it: give --model")
    encoder = DualEncoder.load(name)
    return score_candidates(first, queries=texts, embeddings=stored, encoder=encoder, depth=depth)


def _best(fused: Callable[[float], Run], alphas: list[float], qrels: str, metric: str) -> Run:
    """Prints what each alpha scores and returns the run of the best; of equal ones the first."""
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
    cli.end(
        cli.main(
            "jaxir.fuse:fuse",
            example="python -m jaxir.fuse --runs=bm25.trec,dense.trec --method=rrf --output=hybrid.trec",
        )
    )
