"""Command: scores and compares runs or written answers, or scores a model on a test collection."""

from __future__ import annotations

import json
import types
from typing import TYPE_CHECKING, Any, Literal

from jaxir import cli
from jaxir.core.choices import Rules, check_idle
from jaxir.core.errors import UserError
from jaxir.core.values import Count
from jaxir.data.formats.collection_names import made_kind
from jaxir.evaluation.datasets import parse_dataset
from jaxir.evaluation.retrieval_metrics import (
    ANSWER_METRICS,
    DEFAULT_METRICS,
    QUESTION_METRICS,
    TITLE_METRICS,
)
from jaxir.evaluation.sts_files import has_splits
from jaxir.storage.files import atomic_file
from jaxir.storage.outputs import writes

if TYPE_CHECKING:
    from jaxir.evaluation.evaluation_report import Report

DATASETS = ("beir", "sts", "senteval", "quora", "cqadupstack", "eproduct", "nanobeir")
SEVERAL = {"sts", "senteval", "cqadupstack", "nanobeir"}  # kinds of data that are several sets
METRICS = {
    "answers": ANSWER_METRICS,
    "quora": QUESTION_METRICS,
    "cqadupstack": QUESTION_METRICS,
    "eproduct": TITLE_METRICS,
}
FILES = {"run", "answers", "predictions", "mteb"}  # kinds of evaluation without a model
# Each entry: (flags, what these flags apply to, kinds of evaluation in which they have no effect).
IDLE = (
    (("metrics", "identical_ids"), "retrieval", {"predictions", "mteb", "sts", "senteval"}),
    (("depth", "strict"), "retrieval", {"sts", "senteval"}),
    (("per_query",), "retrieval from one collection", SEVERAL),
    (("split",), "data that have splits", {"senteval", "nanobeir"}),
    (("split", "depth"), "a --dataset", FILES),
    (("answers_in",), "--run with --answers", {"run", "predictions", "mteb", *DATASETS}),
    (("strict",), "judgements", {"answers", "predictions", "mteb"}),
)


@Rules(also_called={"run": "runs", "depth": "k"})
@writes(output="report")
def evaluate(
    *,
    run: list[str] | str | None = None,
    qrels: str | None = None,
    answers: str | None = None,
    answers_in: Literal["text", "document"] = "text",
    corpus: str | None = None,
    predictions: list[str] | str | None = None,
    mteb: str | None = None,
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

    Give --run and --qrels, --run and --answers with --corpus, --predictions and --answers, --mteb and
    --baseline, or --model and --dataset. A judged query without results scores 0. Several systems are
    compared by paired tests over the queries: all pairs of systems, or each system with --baseline. p-values
    are corrected (Holm).

    Args:
      run: TREC run files to score, separated by commas; each may be NAME=FILE. FILE+FILE+FILE are one
        system's runs with several seeds, whose mean and standard deviation are reported.
      qrels: judgements of the runs' queries: BEIR (query-id, corpus-id, score) or TREC format.
      answers: file of lines {"_id": query, "answers": [text, ...]}. Instead of --qrels: a document that
        contains an answer is relevant, and Success@k is the top-k accuracy of open-domain question answering.
      answers_in: look for answers in a document's text, as DPR does, or in the document, its title included.
      corpus: corpus.jsonl[.gz] with the texts of the documents, for --answers.
      predictions: instead of runs, files of written answers, from jaxir.read, to score by exact match and F1.
      mteb: instead of runs, MTEB's results of a model, to compare with those of --baseline on each task that
        both have: [NAME=]DIR[+DIR...], the folders of its results and predictions. Rankings are tested over
        queries, with the judgements in --qrels (DIR of TASK.tsv) or those that MTEB, if installed, loads.
      model: model to evaluate: a jaxir model or run directory, or st: or hf: and a directory or hub name.
      dataset: beir:DIR (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv; exact search), hf:NAME of the Hugging
        Face hub or of a local folder in the layout of BEIR, MTEB, NanoBEIR or BRIGHT (hf:OWNER/NAME/PART),
        or ir_datasets:ID; quora:DIR,
        cqadupstack:DIR (duplicate questions) or eproduct:DIR (titles), like beir:; sts:DIR (rated pairs: .tsv
        files of score, sentence1, sentence2, a year of STS, STS-B, SICK, or a folder of such folders;
        Spearman's correlation x 100); senteval:DIR (transfer tasks; accuracy of logistic regression);
        nanobeir, the 13 collections of the hub, or nanobeir:PLACE (a translation, or a local folder).
      split: the name of a file under qrels/; for sts:, the part of STS-B and SICK in a folder of tasks.
      metrics: separated by spaces, in ir_measures' spelling (default: nDCG@10 RR@10 P@1 R@100, for answers
        Success@1 Success@5 Success@20 Success@100, for duplicate questions nDCG@10 R@10 P@10 R@100, for
        titles CappedR@10 P@10).
      baseline: the system to compare the others with, by name, or [NAME=]FILE[+FILE...]; with --mteb, another
        [NAME=]DIR[+DIR...].
      identical_ids: keep or drop results with their query's own id (ArguAna needs drop; collections that
        number queries and documents from 1 need keep).
      depth: documents retrieved per query of a --dataset.
      strict: refuse judgements of missing documents or queries, repeated lines and grades such as 1.0. By
        default one printed line counts them; as in trec_eval, a missing document is treated as not retrieved.
      per_query: also print the values of each query.
      table: format of the printed tables.
      output: JSON file to write, with all values of all queries.

    Returns:
      The content of the JSON file.
    """
    given = types.SimpleNamespace(**locals())
    _settle(given)
    report = _report_on_files(given) if given.kind in FILES else _report_on_model(given)
    if output is not None:
        with atomic_file(output, errors="backslashreplace") as file:  # file names may not be UTF-8
            json.dump(report.values, file, indent=2, ensure_ascii=False)
            file.write("\n")
    print(report.text)
    return report.values


def _settle(given: types.SimpleNamespace) -> None:
    """Sets `given.kind` (what is evaluated), `given.path` (a dataset's directory) and `given.metrics`."""
    inputs = ("run", "qrels", "answers", "corpus", "predictions", "mteb", "model", "dataset")
    names = {name for name in inputs if getattr(given, name) not in (None, [], ())}
    if names == {"run", "qrels"}:
        given.kind = "run"
    elif names == {"run", "answers", "corpus"}:
        given.kind = "answers"
    elif names == {"predictions", "answers"}:
        given.kind = "predictions"
    elif names in ({"mteb"}, {"mteb", "qrels"}):
        given.kind = "mteb"
        if given.baseline is None:
            raise UserError("--mteb compares two models: give --baseline=DIR, MTEB's results of the other")
    elif names == {"model", "dataset"}:
        kind, _, place = given.dataset.partition(":")
        if made_kind(given.dataset) is not None:
            given.kind, given.path = "beir", given.dataset  # reports show the name as given, not a folder
        elif kind == "nanobeir":
            given.kind, given.path = kind, place
        else:
            given.kind, given.path = parse_dataset(given.dataset, *DATASETS)
    else:
        got = " and ".join(f"--{name}" for name in inputs if name in names) or "neither"
        raise UserError(
            "give --run and --qrels, or --run, --answers and --corpus, or --predictions and --answers, or"
            " --mteb and --baseline, or --model and --dataset; got " + got
        )
    if given.kind in SEVERAL and given.baseline is not None:
        raise UserError(f"--baseline only applies to one collection, not to {given.kind}: leave it out")
    for flags, what, kinds in IDLE:
        if given.kind in kinds:
            check_idle(evaluate, what, **{flag: getattr(given, flag) for flag in flags})
    if given.kind == "sts" and not has_splits(given.path):
        what = "a folder of tasks that have splits (for one task give its file: sts:STSB/sts-dev.csv)"
        check_idle(evaluate, what, split=given.split)
    given.metrics = given.metrics or METRICS.get(given.kind, DEFAULT_METRICS)


def _report_on_files(given: types.SimpleNamespace) -> Report:
    from jaxir.evaluation import evaluation_report, mteb_report

    if given.kind == "mteb":
        how = {"qrels": given.qrels, "per_query": given.per_query, "style": given.table}
        return mteb_report.report(given.mteb, given.baseline, **how)
    files = given.predictions if given.kind == "predictions" else given.run
    files = [files] if isinstance(files, str) else files
    if given.kind == "predictions":
        scored = evaluation_report.score_predictions(files, given.answers, baseline=given.baseline)
    else:
        scored = evaluation_report.score_runs(
            files,
            given.metrics,
            given.identical_ids,
            baseline=given.baseline,
            qrels=given.qrels,
            answers=given.answers,
            corpus=given.corpus,
            answers_in=given.answers_in,
            strict=given.strict,
        )
    return evaluation_report.retrieval(scored, per_query=given.per_query, style=given.table)


def _report_on_model(given: types.SimpleNamespace) -> Report:
    from jaxir.evaluation import evaluation_report, forum_report, sentence_reports

    if given.kind == "sts":
        return sentence_reports.sts(given.model, given.path, given.split, given.table)
    if given.kind == "senteval":
        return sentence_reports.senteval(given.model, given.path, given.table)
    how = {"depth": given.depth, "strict": given.strict}
    if given.kind == "nanobeir":
        asked = (given.model, given.path, given.metrics, given.identical_ids)
        return forum_report.nanobeir(*asked, style=given.table, **how)
    if given.kind == "cqadupstack":
        asked = (given.model, given.path, given.split, given.metrics, given.identical_ids)
        return forum_report.cqadupstack(*asked, style=given.table, **how)
    asked = (given.model, given.kind, given.path, given.split, given.metrics, given.identical_ids)
    scored = evaluation_report.score_model(*asked, baseline=given.baseline, **how)
    return evaluation_report.retrieval(scored, per_query=given.per_query, style=given.table)


if __name__ == "__main__":
    cli.start(
        "jaxir.evaluate:evaluate",
        "--run=hybrid.trec --qrels=qrels/test.tsv --baseline=bm25.trec\n"
        "--model=st:all-MiniLM-L6-v2 --dataset=beir:DIR\n"
        "--mteb=ours/results --baseline=theirs/results",
    )
