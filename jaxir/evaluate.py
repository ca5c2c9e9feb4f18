"""Command: scores and compares run files or written answers, or scores a model on a whole test collection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.values import Count, check_idle
from jaxir.evaluation.datasets import parse_dataset
from jaxir.evaluation.retrieval_metrics import (
    ANSWER_METRICS,
    DEFAULT_METRICS,
    QUESTION_METRICS,
    TITLE_METRICS,
)
from jaxir.evaluation.sts_files import has_splits
from jaxir.storage.outputs import writes

KINDS = ("beir", "sts", "senteval", "quora", "cqadupstack", "eproduct")
METRICS = {"quora": QUESTION_METRICS, "cqadupstack": QUESTION_METRICS, "eproduct": TITLE_METRICS}


@cli.also_called(run="runs", depth="k")
@writes(output="report")
def evaluate(
    *,
    run: list[str] | str | None = None,
    qrels: str | None = None,
    answers: str | None = None,
    answers_in: Literal["text", "document"] = "text",
    corpus: str | None = None,
    predictions: list[str] | str | None = None,
    model: str | None = None,
    dataset: str | None = None,
    split: str = "test",
    metrics: str | None = None,
    baseline: str | None = None,
    identical_ids: Literal["keep", "drop"] = "keep",
    depth: Count = 1000,
    strict: bool = False,
    per_query: bool = False,
    table: Literal["markdown", "latex"] = "markdown",
    output: str | None = None,
) -> dict[str, Any]:
    """Scores and compares run files or written answers, or scores a model on a whole test collection.

    Give --run and --qrels, --run and --answers with --corpus, --predictions and --answers, or --model and
    --dataset. A judged query without answers counts 0. Several systems are compared by paired tests over the
    queries, with --baseline all others with that one, else every two; p-values are corrected for the number
    of comparisons (Holm).

    Args:
      run: TREC run files to score, separated by commas; each may be NAME=FILE, and FILE+FILE+FILE are one
        system's runs with several seeds, whose mean and standard deviation are told.
      qrels: judgements of the runs' queries: BEIR (query-id, corpus-id, score) or TREC format.
      answers: instead of judgements, lines of {"_id": query, "answers": [text, ...]}: a document that holds
        one is relevant, and Success@k is the top-k accuracy of open-domain question answering.
      answers_in: where in a document of --corpus an answer is looked for: in its text, as DPR does, or in the
        document, its title too.
      corpus: corpus.jsonl[.gz] with the texts of the documents, for --answers.
      predictions: in place of runs, files of written answers (of jaxir.read) to compare with --answers by
        exact match and F1; written as those.
      model: model to evaluate: a jaxir model or run directory, or st: or hf: and a directory or hub name.
      dataset: beir:DIR (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv; exact search); quora:DIR and
        cqadupstack:DIR (duplicate questions) and eproduct:DIR (titles), likewise; sts:DIR (rated pairs: .tsv
        files of score, sentence1, sentence2, a year of STS, STS-B, SICK, or a folder of such folders;
        Spearman's correlation x 100); senteval:DIR (transfer tasks; accuracy of logistic regression).
      split: which of the dataset's judgements, the name of a file under qrels/; which part of STS-B and SICK
        in a folder of several tasks.
      metrics: separated by spaces, as ir_measures spells them; None: nDCG@10 RR@10 P@1 R@100, by answers
        Success@1 Success@5 Success@20 Success@100, of duplicate questions nDCG@10 R@10 P@10 R@100, of titles
        CappedR@10 P@10.
      baseline: what to compare with: the name of one of the systems, or [NAME=]FILE[+FILE...], which may be
        among the runs.
      identical_ids: keep or drop answers that have their query's own id (ArguAna needs drop; collections that
        number queries and documents from 1 need keep).
      depth: answers per query that are searched for in a beir: dataset.
      strict: refuse judgements of documents or queries that are not there, repeated lines and grades such as
        1.0. By default one line reports how many there are: as in trec_eval, a missing document counts as not
        retrieved, and a missing query counts 0.
      per_query: print every query's values too.
      table: how tables are printed.
      output: JSON file for all values, every query's included.

    Returns:
      What the JSON file holds.

    Raises:
      UserError: flags that do not go together, unreadable or malformed files, an unknown metric.
    """
    from jaxir.evaluation import evaluation_report

    kind, path = _check_flags(
        run=run,
        qrels=qrels,
        answers=answers,
        corpus=corpus,
        predictions=predictions,
        model=model,
        dataset=dataset,
    )
    if kind in ("sts", "senteval", "cqadupstack") and baseline is not None:
        raise UserError(f"--baseline compares runs over one collection; {kind}: has none")
    if kind in ("sts", "senteval"):
        check_idle(
            evaluate, "retrieval", metrics=metrics, identical_ids=identical_ids, depth=depth, strict=strict
        )
    if kind in ("sts", "senteval", "cqadupstack"):
        check_idle(evaluate, "retrieval from one collection", per_query=per_query)
    if kind == "senteval":
        check_idle(evaluate, "data that have splits", split=split)
    if kind == "sts" and not has_splits(path):
        what = "data that have splits, a folder of tasks (of one give the file, as sts:STSB/sts-dev.csv)"
        check_idle(evaluate, what, split=split)
    if kind in ("run", "predictions"):
        check_idle(evaluate, "a --dataset", split=split, depth=depth)
    if kind != "run" or answers is None:
        check_idle(evaluate, "--run with --answers", answers_in=answers_in)
    if kind == "predictions":
        check_idle(evaluate, "retrieval", metrics=metrics, identical_ids=identical_ids)
    if answers is not None:
        check_idle(evaluate, "judgements", strict=strict)
    default = METRICS.get(kind, DEFAULT_METRICS) if answers is None else ANSWER_METRICS
    metrics = metrics or default
    if kind == "sts":
        from jaxir.evaluation import sentence_reports

        result = sentence_reports.sts(model, path, split, table)
    elif kind == "senteval":
        from jaxir.evaluation import sentence_reports

        result = sentence_reports.senteval(model, path, table)
    elif kind == "cqadupstack":
        from jaxir.evaluation import forum_report

        result = forum_report.cqadupstack(
            model, path, split, metrics, identical_ids, depth, table, strict=strict
        )
    else:
        if kind == "run":
            runs = [run] if isinstance(run, str) else run
            scored = evaluation_report.score_runs(
                runs,
                metrics,
                identical_ids,
                baseline=baseline,
                qrels=qrels,
                answers=answers,
                corpus=corpus,
                answers_in=answers_in,
                strict=strict,
            )
        elif kind == "predictions":
            systems = [predictions] if isinstance(predictions, str) else predictions
            scored = evaluation_report.score_predictions(systems, answers, baseline=baseline)
        else:
            scored = evaluation_report.score_model(
                model, kind, path, split, metrics, identical_ids, depth, baseline=baseline, strict=strict
            )
        result = evaluation_report.retrieval(scored, per_query=per_query, style=table)
    if output is not None:
        from jaxir.storage.files import atomic_file

        # A file's name need not be Unicode: what is not becomes JSON's own escape.
        with atomic_file(output, errors="backslashreplace") as file:
            json.dump(result.values, file, indent=2, ensure_ascii=False)
            file.write("\n")
    print(result.text)
    return result.values


def _check_flags(**given: Any) -> tuple[str, Path]:
    """Returns what is to be evaluated, "run" or the dataset's kind, and the dataset's directory."""
    for name in ("run", "predictions"):
        if given[name] in ([], ()):
            raise UserError(f"--{name} has no {'run ' * (name == 'run')}file")
    names = {name for name, value in given.items() if value is not None}
    if names in ({"run", "qrels"}, {"run", "answers", "corpus"}):
        return "run", Path()
    if names == {"predictions", "answers"}:
        return "predictions", Path()
    if names != {"model", "dataset"}:
        got = " and ".join(f"--{name}" for name in given if name in names) or "neither"
        raise UserError(
            "give --run and --qrels, or --run, --answers and --corpus, or --predictions and --answers, or"
            " --model and --dataset; got " + got
        )
    return parse_dataset(given["dataset"], *KINDS)


if __name__ == "__main__":
    cli.end(
        cli.main(
            "jaxir.evaluate:evaluate",
            example="python -m jaxir.evaluate --run=hybrid.trec --qrels=qrels/test.tsv --baseline=bm25.trec\n"
            "  python -m jaxir.evaluate --model=st:all-MiniLM-L6-v2 --dataset=beir:DIR",
        )
    )
