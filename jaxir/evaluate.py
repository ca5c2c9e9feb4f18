"""Command: scores and compares run files, or a model on a whole test collection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from jaxir import cli
from jaxir.errors import UserError
from jaxir.evaluation.datasets import parse_dataset
from jaxir.evaluation.retrieval import DEFAULT_METRICS
from jaxir.outputs import writes
from jaxir.simple_types import Count, check_idle


@cli.also_called(run="runs", depth="k")
@writes(output="report")
def evaluate(
    *,
    run: list[str] | str | None = None,
    qrels: str | None = None,
    answers: str | None = None,
    corpus: str | None = None,
    model: str | None = None,
    dataset: str | None = None,
    split: str = "test",
    metrics: str = DEFAULT_METRICS,
    baseline: str | None = None,
    identical_ids: Literal["keep", "drop"] = "keep",
    depth: Count = 1000,
    per_query: bool = False,
    table: Literal["markdown", "latex"] = "markdown",
    output: str | None = None,
) -> dict[str, Any]:
    """Scores and compares run files, or scores a model on a whole test collection.

    Give --run and --qrels, --run and --answers with --corpus, or --model and --dataset. A judged query
    without answers counts 0. Several systems are compared by paired tests over the queries, with --baseline
    all others with that one, else every two; p-values are corrected for the number of comparisons (Holm).

    Args:
      run: TREC run files to score, separated by commas; each may be NAME=FILE, and FILE+FILE+FILE are one
        system's runs with several seeds, whose mean and standard deviation are told.
      qrels: judgements of the runs' queries: BEIR (query-id, corpus-id, score) or TREC format.
      answers: instead of judgements, lines of {"_id": query, "answers": [text, ...]}: a document that holds
        one is relevant, and Success@k is the top-k accuracy of open-domain question answering.
      corpus: corpus.jsonl[.gz] with the texts of the documents, for --answers.
      model: model to evaluate: a jaxir model or run directory, or st: or hf: and a directory or hub name.
      dataset: beir:DIR (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv; exact search) or sts:DIR (.tsv files of
        score, sentence1, sentence2; Spearman's correlation x 100).
      split: which of the dataset's judgements, the name of a file under qrels/.
      metrics: separated by spaces, as ir_measures spells them.
      baseline: what to compare with: the name of one of the systems, or [NAME=]FILE[+FILE...], which may be
        among the runs.
      identical_ids: keep or drop answers that have their query's own id (ArguAna needs drop; collections that
        number queries and documents from 1 need keep).
      depth: answers per query that are searched for in a beir: dataset.
      per_query: print every query's values too.
      table: how tables are printed.
      output: JSON file for all values, every query's included.

    Returns:
      What the JSON file holds.

    Raises:
      UserError: flags that do not go together, unreadable or malformed files, an unknown metric.
    """
    from jaxir.evaluation import report

    kind, path = _check_flags(
        run=run, qrels=qrels, answers=answers, corpus=corpus, model=model, dataset=dataset
    )
    if kind != "beir":
        check_idle(evaluate, "a beir: dataset", split=split, depth=depth)
    if kind == "sts":
        check_idle(
            evaluate,
            "retrieval",
            metrics=metrics,
            identical_ids=identical_ids,
            per_query=per_query,
            table=table,
        )
    if kind == "sts":
        if baseline is not None:
            raise UserError("--baseline compares retrieval runs; an sts: dataset has none")
        result = report.sts(model, path)
    else:
        if kind == "run":
            runs = [run] if isinstance(run, str) else run
            scored = report.score_runs(
                runs, metrics, identical_ids, baseline=baseline, qrels=qrels, answers=answers, corpus=corpus
            )
        else:
            scored = report.score_model(model, path, split, metrics, identical_ids, depth, baseline=baseline)
        result = report.retrieval(scored, per_query=per_query, style=table)
    if output is not None:
        from jaxir.files import atomic_file

        # A file's name need not be Unicode: what is not becomes JSON's own escape.
        with atomic_file(output, errors="backslashreplace") as file:
            json.dump(result.values, file, indent=2, ensure_ascii=False)
            file.write("\n")
    print(result.text)
    return result.values


def _check_flags(**given: Any) -> tuple[Literal["run", "beir", "sts"], Path]:
    """Returns what is to be evaluated and the dataset's directory."""
    if given["run"] in ([], ()):
        raise UserError("--run has no run file")
    names = {name for name, value in given.items() if value is not None}
    if names in ({"run", "qrels"}, {"run", "answers", "corpus"}):
        return "run", Path()
    if names != {"model", "dataset"}:
        got = " and ".join(f"--{name}" for name in given if name in names) or "neither"
        raise UserError(
            "give --run and --qrels, or --run, --answers and --corpus, or --model and --dataset; got " + got
        )
    kind, directory = parse_dataset(given["dataset"], "beir", "sts")
    return kind, directory


if __name__ == "__main__":
    raise SystemExit(
        cli.main(
            "jaxir.evaluate:evaluate",
            example="python -m jaxir.evaluate --run=hybrid.trec --qrels=qrels/test.tsv --baseline=bm25.trec\n"
            "  python -m jaxir.evaluate --model=st:all-MiniLM-L6-v2 --dataset=beir:DIR",
        )
    )
