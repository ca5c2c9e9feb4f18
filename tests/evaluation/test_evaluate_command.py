"""The command on run files: what it prints and writes, comparisons, and bad input of every kind."""

import json
import math
import subprocess
import sys

import pytest

from jaxir import cli
from jaxir.errors import UserError
from jaxir.evaluate import evaluate

RUN = (
    "q1 Q0 d2 1 3.0 a\nq1 Q0 d1 2 2.0 a\nq2 Q0 d9 1 1.0 a\n"
    "q9 Q0 d1 1 1.0 a\nq3 Q0 q3 1 2.0 a\nq3 Q0 d3 2 1.0 a\n"
)
OTHER = "q1 Q0 d1 1 3.0 b\nq1 Q0 d2 2 2.0 b\nq2 Q0 d1 1 1.0 b\n"
BEIR = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td1\t1\nq3\td3\t1\n"
TREC = "q1 0 d1 2\nq1 0 d2 0\nq2 0 d1 1\nq3 0 d3 1\n"


@pytest.fixture
def files(tmp_path):
    for name, content in (("run.trec", RUN), ("other.trec", OTHER), ("test.tsv", BEIR), ("qrels.txt", TREC)):
        (tmp_path / name).write_text(content)
    return tmp_path


def arguments(files, **more):
    return {"run": str(files / "run.trec"), "qrels": str(files / "test.tsv")} | more


@pytest.mark.parametrize("qrels", ["test.tsv", "qrels.txt"])
def test_values_by_hand(files, capsys, qrels):
    result = evaluate(
        **arguments(files, qrels=str(files / qrels), metrics="RR@10 P@1 nDCG@10", per_query=True)
    )
    assert result["per_query"]["RR@10"] == {"q1": 0.5, "q2": 0.0, "q3": 0.5}
    assert result["metrics"]["RR@10"] == pytest.approx(1 / 3)
    assert result["metrics"]["P@1"] == 0.0
    assert result["metrics"]["nDCG@10"] == pytest.approx(2 / math.log2(3) / 3)
    assert (result["queries"], result["unjudged_queries_ignored"], result["identical_ids_found"]) == (3, 1, 1)
    printed = capsys.readouterr().out
    assert "3 judged queries" in printed and "own id kept (1 found)" in printed
    assert "| q3    | 0.5000 |" in printed and "0.4206" in printed


def test_identical_ids_dropped_on_request(files, capsys):
    result = evaluate(**arguments(files, metrics="RR@10", identical_ids="drop"))
    assert result["per_query"]["RR@10"]["q3"] == 1.0
    assert result["identical_ids"] == "drop" and "own id dropped (1 found)" in capsys.readouterr().out


def test_baseline_is_compared_by_paired_tests(files, capsys):
    result = evaluate(**arguments(files, metrics="RR@10", baseline=str(files / "other.trec")))
    comparison = result["baseline"]["comparison"]["RR@10"]
    # Differences -0.5, -1, 0.5: of 8 sign flips, 6 have a mean of at least 1/3 from 0.
    assert result["baseline"]["per_query"]["RR@10"] == {"q1": 1.0, "q2": 1.0, "q3": 0.0}
    assert (comparison["wins"], comparison["losses"]) == (1, 2)
    assert comparison["randomisation"] == pytest.approx(0.75)
    assert comparison["t_test"] == pytest.approx(0.5286, abs=1e-4)
    printed = capsys.readouterr().out
    assert "randomisation p" in printed and "-0.3333" in printed and "0.75" in printed


def test_the_command_writes_json_whole(files):
    flags = [f"--{name}={value}" for name, value in arguments(files, output=str(files / "out.json")).items()]
    done = subprocess.run(
        [sys.executable, "-m", "jaxir.evaluate", *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((files / "out.json").read_text())
    assert list(written["metrics"]) == ["nDCG@10", "RR@10", "P@1", "R@100"]
    assert written["run"].endswith("run.trec")
    assert f"{written['metrics']['R@100']:.4f}" in done.stdout


def test_scoring_a_run_loads_no_jax(files):
    code = (
        "import sys; from jaxir.evaluate import evaluate\n"
        f"evaluate(**{arguments(files)!r})\n"
        "assert not {'jax', 'tensorflow', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("changed", "content", "message"),
    [
        ("test.tsv", "", "test.tsv: the file is empty"),
        ("test.tsv", "query-id\tcorpus-id\tscore\n", "no usable record"),
        ("test.tsv", BEIR + "q1\td7\n", "test.tsv:6:"),
        ("test.tsv", BEIR + "q1\td7\tmuch\n", "test.tsv:6: the score is not an integer"),
        ("test.tsv", BEIR + "q1\td1\t1\n", "test.tsv:6: contradicts"),
        ("test.tsv", TREC + "q1 0 d7\n", "test.tsv:5: expected 4 columns"),
        ("test.tsv", TREC + "q1 0 d7 x\n", "test.tsv:5: the score is not an integer"),
        ("test.tsv", TREC + "q1 0 d1 1\n", "test.tsv:5: contradicts"),
        ("test.tsv", "other\td1\t1\n", "none of the judged queries"),
        ("run.trec", "", "none of the judged queries"),
        ("run.trec", RUN + "q1 Q0 d2 9 0.1 a\n", "run.trec:7:"),
        ("run.trec", RUN + "q1 Q0 d5 9 high a\n", "run.trec:7:"),
        ("run.trec", RUN + "q1 d5 9 1.0\n", "run.trec:7:"),
    ],
)
def test_bad_files_cost_one_sentence(files, capsys, changed, content, message):
    (files / changed).write_text(content)
    output = files / "out.json"
    flags = [f"--{name}={value}" for name, value in arguments(files, output=str(output)).items()]
    assert cli.main("jaxir.evaluate:evaluate", flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert sorted(p.name for p in files.iterdir()) == ["other.trec", "qrels.txt", "run.trec", "test.tsv"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got neither"),
        ({"run": "r"}, "give --run and --qrels"),
        ({"run": "r", "qrels": "q", "model": "m"}, "give --run and --qrels"),
        ({"model": "m", "dataset": "DIR"}, "beir:DIR or sts:DIR"),
        ({"model": "m", "dataset": "bier:DIR"}, "did you mean 'beir'"),
        ({"model": "m", "dataset": "sts:"}, "beir:DIR or sts:DIR"),
        ({"model": "m", "dataset": "sts:DIR", "baseline": "r"}, "--baseline"),
        ({"run": "no.trec", "qrels": "no.tsv"}, r"no\.tsv"),
        ({"model": "m", "dataset": "beir:no/such"}, "no/such"),
        ({"model": "m", "dataset": "beir:no/such", "metrics": "nope"}, "no metric 'nope'"),
    ],
)
def test_flags_that_do_not_go_together(given, message):
    with pytest.raises(UserError, match=message):
        evaluate(**given)
