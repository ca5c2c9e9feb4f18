import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from jaxir.core.errors import UserError
from jaxir.data.formats.answers import read_answers
from jaxir.evaluate import evaluate
from jaxir.evaluation.answer_match import tokens_of
from jaxir.evaluation.judgements import read_judgements
from tests.evaluation.published_files import BEIR, RUN, TREC

OTHER = "q1 Q0 d1 1 3.0 b\nq1 Q0 d2 2 2.0 b\nq2 Q0 d1 1 1.0 b\n"


@pytest.fixture
def files(tmp_path):
    for name, content in (("run.trec", RUN), ("other.trec", OTHER), ("test.tsv", BEIR), ("qrels.txt", TREC)):
        (tmp_path / name).write_text(content)
    return tmp_path


def arguments(files, **more):
    return {"run": str(files / "run.trec"), "qrels": str(files / "test.tsv")} | more


@pytest.mark.parametrize("qrels", ["test.tsv", "qrels.txt"])
def test_values_by_hand(files, capsys, qrels):
    given = arguments(files, qrels=str(files / qrels), metrics="RR@10 P@1 nDCG@10")
    result = evaluate(**given, per_query=True)
    assert result["per_query"]["RR@10"] == {"q1": 0.5, "q2": 0.0, "q3": 0.5}
    assert result["metrics"]["RR@10"] == pytest.approx(1 / 3)
    assert result["metrics"]["P@1"] == 0.0
    assert result["metrics"]["nDCG@10"] == pytest.approx(2 / math.log2(3) / 3)
    assert (result["queries"], result["unjudged_queries_ignored"], result["identical_ids_found"]) == (3, 1, 1)
    printed = capsys.readouterr().out
    assert "3 judged queries" in printed and "own id kept (1 found)" in printed
    assert "| q3    | 0.5000 |" in printed and "0.4206" in printed


def test_the_difference_of_counts_is_that_of_the_counts_shown(files, capsys):
    other = str(files / "other.trec")
    evaluate(**arguments(files, metrics="NumRet RR@10", baseline=other))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[1]: row[3:8:2] for row in rows if len(row) > 8}
    assert shown["NumRet"] == ["3.0000", "5.0000", "2.0000"]
    assert shown["RR@10"] == ["0.6667", "0.3333", "-0.3333"]
    third = f"third={shutil.copy(files / 'run.trec', files / 'third.trec')}"
    evaluate(**arguments(files, run=[str(files / "run.trec"), third], metrics="NumRet", baseline=other))
    assert "| NumRet | run    | other   |     2.0000 |" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["a query\td1\t2\n", "a\t0\td1\t2\n", "a 0  d1 2\n"])
def test_judgements_of_either_format_need_no_header(files, line):
    (files / "qrels").write_text(line)
    assert read_judgements(files / "qrels") == {"a query" if "query" in line else "a": {"d1": 2}}


def test_a_cutoff_beyond_the_runs_depth_is_reported(files, folder, capsys):
    lines = [f"q{i} Q0 d{i + n} {n} {9 - n} t\n" for i in range(40) for n in range(5)]
    (files / "cut.trec").write_text("".join(lines))
    given = {"run": str(files / "cut.trec"), "qrels": str(folder / "qrels/train.tsv")}
    evaluate(**given, metrics="R@5 nDCG@10 CappedR@7 AP")
    note = "no query has more than 5 results, so deeper ranks are empty for nDCG@10, CappedR@7"
    assert note in capsys.readouterr().out
    evaluate(**given, metrics="R@5 RR@3 AP")
    assert "more than" not in capsys.readouterr().out
    # This run ranks every document.
    whole = [f"q{i} Q0 d{n} {n} {99 - n} t\n" for i in range(40) for n in range(56)]
    (files / "cut.trec").write_text("".join(whole))
    evaluate(**given, metrics="R@100")
    assert "more than" not in capsys.readouterr().out


def test_baseline_is_compared_by_paired_tests(files, capsys):
    result = evaluate(**arguments(files, metrics="RR@10", baseline=str(files / "other.trec")))
    (pair,) = result["comparisons"]
    assert (pair["system"], pair["baseline"], pair["metric"]) == ("run", "other", "RR@10")
    comparison = pair["comparison"]
    # The differences are -0.5, -1 and 0.5. Of 8 sign flips, 6 have a mean at least as far from 0: p = .75.
    assert result["systems"]["other"]["per_query"]["RR@10"] == {"q1": 1.0, "q2": 1.0, "q3": 0.0}
    assert (comparison["wins"], comparison["losses"]) == (1, 2)
    assert comparison["randomisation"] == pytest.approx(0.75)
    assert comparison["t_test"] == pytest.approx(0.5286, abs=1e-4)
    printed = capsys.readouterr().out
    assert "randomisation p" in printed and "-0.3333" in printed and "0.75" in printed


def test_the_command_writes_json_whole(files):
    flags = [f"--{name}={value}" for name, value in arguments(files, output=str(files / "out.json")).items()]
    command = [sys.executable, "-m", "jaxir.evaluate", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written = json.loads((files / "out.json").read_text())
    assert list(written["metrics"]) == ["nDCG@10", "RR@10", "P@1", "R@100"]
    assert [Path(file).name for file in written["runs"]["run"]] == ["run.trec"]
    assert f"{written['metrics']['R@100']:.4f}" in done.stdout


def test_scoring_a_run_loads_no_jax(files):
    code = (
        "import sys; from jaxir.evaluate import evaluate\n"
        f"evaluate(**{arguments(files)!r})\n"
        "assert not {'jax', 'tensorflow', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def write_runs(files):
    """Writes runs of three systems on 30 queries with one relevant document each; `b` has three seeds."""
    rng = np.random.default_rng(0)
    hits = {"a": 0.3, "b0": 0.6, "b1": 0.6, "b2": 0.6, "c": 0.35}
    found = {name: rng.uniform(size=30) < share for name, share in hits.items()}
    for name, right in found.items():
        lines = [f"q{i} Q0 {'d' if hit else 'x'}{i} 1 1.0 t\n" for i, hit in enumerate(right)]
        (files / f"{name}.trec").write_text("".join(lines))
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(30))
    (files / "many.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    seeds = "+".join(str(files / f"b{i}.trec") for i in range(3))
    runs = [str(files / "a.trec"), f"tuned={seeds}", f"other={files / 'c.trec'}"]
    return {"run": runs, "qrels": str(files / "many.tsv"), "metrics": "P@1"}, found


def test_several_systems_and_seeds(files, capsys):
    given, found = write_runs(files)
    result = evaluate(**given, baseline="a")
    printed = capsys.readouterr().out
    tuned = [float(found[f"b{i}"].mean()) for i in range(3)]
    assert result["systems"]["tuned"]["metrics"]["P@1"] == pytest.approx(np.mean(tuned))
    assert result["systems"]["tuned"]["deviations"]["P@1"] == pytest.approx(np.std(tuned, ddof=1))
    assert f"| {np.mean(tuned):.4f} ± {np.std(tuned, ddof=1):.4f} |" in printed
    assert "tuned: mean ± standard deviation of 3 runs" in printed
    assert [(p["system"], p["baseline"]) for p in result["comparisons"]] == [("tuned", "a"), ("other", "a")]
    first = result["comparisons"][0]
    seeds = np.mean([found[f"b{i}"] for i in range(3)], axis=0)
    expected = stats.ttest_rel(seeds, found["a"].astype(float)).pvalue
    assert first["comparison"]["t_test"] == pytest.approx(expected) and expected < 0.05
    assert first["t_test"] == pytest.approx(2 * expected), "Holm: the smaller of two"
    flips = [p["comparison"]["randomisation"] for p in result["comparisons"]]
    assert first["randomisation"] == pytest.approx(2 * flips[0]) and flips[0] < min(0.5, flips[1])
    (row,) = (x.split("|") for x in printed.splitlines() if x.startswith("| P@1") and "tuned" in x)
    counts = [str(np.sum(sign * (seeds - found["a"]) > 0)) for sign in (1, -1)]
    p_values = [f"{first[test]:.2g}" for test in ("t_test", "randomisation")]
    assert [cell.strip() for cell in row[5:9]] == [*counts, *p_values], "the corrected ones are printed"
    assert "corrected for 2 comparisons by each metric (Holm)" in printed
    assert printed.count("own id kept (0 found)") == 1
    every = [(p["system"], p["baseline"]) for p in evaluate(**given)["comparisons"]]
    assert every == [("tuned", "a"), ("other", "a"), ("other", "tuned")]


def test_a_baseline_among_the_runs_counts_once(files):
    """The comparisons and their correction do not depend on the spelling of the baseline's path."""
    given, _ = write_runs(files)
    (files / "link.trec").symlink_to("a.trec")
    expected = evaluate(**given, baseline="a")
    for spelling in (f"{files}/./a.trec", f"{files}/link.trec", f"first={files}/a.trec"):
        assert evaluate(**given, baseline=spelling) == expected


def test_runs_in_directories_with_an_equals_sign(files):
    """The argument lr=1e-5/run.trec is the path of a run, not a run of a system called lr."""
    given, _ = write_runs(files)
    runs = []
    for seed in range(2):
        runs.append(files / f"lr=1e-5,seed={seed}" / f"b{seed}.trec")
        runs[-1].parent.mkdir()
        (files / f"b{seed}.trec").rename(runs[-1])
    result = evaluate(qrels=given["qrels"], run=["+".join(map(str, runs))], baseline=str(files / "a.trec"))
    assert result["runs"] == {"b0": [*map(str, runs)], "a": [str(files / "a.trec")]}


def test_seeds_are_a_baseline_in_any_order_and_a_part_of_them_is_another_one(files):
    given, _ = write_runs(files)
    seeds = [str(files / f"b{i}.trec") for i in (2, 0, 1)]
    found = evaluate(**given, baseline="+".join(seeds))["comparisons"]
    assert {(p["system"], p["baseline"]) for p in found} == {("a", "tuned"), ("other", "tuned")}
    result = evaluate(**given, baseline="+".join(seeds[:2]))
    assert len(result["comparisons"]) == 3 and result["runs"]["b2"] == seeds[:2]


def test_latex(files, capsys):
    given, _ = write_runs(files)
    evaluate(**given, baseline="a", table="latex")
    printed = capsys.readouterr().out
    assert printed.count(r"\begin{tabular}{") == 2 and r"$\pm$" in printed
    assert "% 30 judged queries; results with their query's own id kept (0 found)" in printed
    assert "% p-values are corrected" in printed and is_latex(printed)
    (files / "x.tsv").write_text("score\tsentence1\tsentence2\n1\ta dog\ta cat\n4.5\ta\tb\n")
    model = f"hf:{Path(__file__).resolve().parent.parent / 'golden' / 'bert'}"
    evaluate(model=model, dataset=f"sts:{files}/x.tsv", table="latex")
    printed = capsys.readouterr().out
    assert "% Spearman's correlation" in printed and is_latex(printed)


def is_latex(printed: str) -> bool:
    """Returns whether everything outside of tables is a comment."""
    rest = re.sub(r"\\begin\{tabular\}.*?\\end\{tabular\}", "", printed, flags=re.DOTALL)
    return all(line.startswith("% ") for line in rest.splitlines() if line)


def test_tokens_are_lowercased_without_their_context():
    """Python's lower case of a final sigma depends on the next character."""
    assert tokens_of("\u039f\u0394\u039f\u03a3.\u0391")[0] == tokens_of("\u039f\u0394\u039f\u03a3")[0]


def test_answers_are_matched_by_whole_tokens(files, capsys):
    passages = {"d1": "The U.S. Senate, 1789.", "d2": "Beyonc\u00e9 was born in Houston", "d3": "A cathedral"}
    passages |= {"d9": "nothing", "q3": "Cat-like", "unread": "the senate"}
    lines = [json.dumps({"_id": i, "title": "", "text": text}) for i, text in passages.items()]
    (files / "corpus.jsonl").write_text("\n".join(lines))
    answers = {"q1": ["u.s. senate"], "q2": ["Beyonce\u0301"], "q3": ["cat"], "q5": ["x"]}
    lines = [json.dumps({"_id": q, "answers": a}) for q, a in answers.items()]
    (files / "answers.jsonl").write_text("\n".join(lines))
    (files / "run.trec").write_text(RUN + "q2 Q0 d2 2 0.5 a\n")
    given = {"answers": str(files / "answers.jsonl"), "corpus": str(files / "corpus.jsonl")}
    result = evaluate(run=str(files / "run.trec"), **given, metrics="Success@1 Success@2")
    # q1: the second document has the answer. q2: it is in the second, with accents composed in another way.
    # q3: "Cat-like" has the answer's token, "cathedral" does not. q5: the question has no answers at all.
    assert result["per_query"]["Success@1"] == {"q1": 0, "q2": 0, "q3": 1, "q5": 0}
    assert result["per_query"]["Success@2"] == {"q1": 1, "q2": 1, "q3": 1, "q5": 0}
    assert "holds an answer" in capsys.readouterr().out
    usual = evaluate(run=str(files / "run.trec"), **given)["metrics"]
    assert usual == {"Success@1": 0.25, "Success@5": 0.75, "Success@20": 0.75, "Success@100": 0.75}
    # With answers_in="document" a title counts too.
    titled = [json.dumps({"_id": i, "title": "Cat X", "text": text}) for i, text in passages.items()]
    (files / "titled.jsonl").write_text("\n".join(titled))
    given_titles = given | {"corpus": str(files / "titled.jsonl"), "metrics": "Success@1"}
    for answers_in, q3 in (("text", 0), ("document", 1)):
        (files / "odd.trec").write_text("q3 Q0 d3 1 3.0 a\n")
        result = evaluate(run=str(files / "odd.trec"), **given_titles, answers_in=answers_in)
        assert result["per_query"]["Success@1"]["q3"] == q3 and result["answers_in"] == answers_in
    # Documents that only the baseline finds are judged too.
    (files / "other.trec").write_text("q1 Q0 d9 1 2.0 a\nq3 Q0 d3 1 2.0 a\nq2 Q0 d2 1 2.0 a\n")
    only = files / "only.trec"
    only.write_text("q3 Q0 q3 1 3.0 a\n")
    compared = evaluate(run=str(files / "other.trec"), **given, metrics="Success@1", baseline=str(only))
    assert compared["systems"]["only"]["per_query"]["Success@1"] == {"q1": 0, "q2": 0, "q3": 1, "q5": 0}
    (files / "corpus.jsonl").write_text('{"_id": "q1", "text": "u.s. senate"}\n')
    with pytest.raises(UserError, match=r"5 documents of the runs are missing, such as 'd1'"):
        evaluate(run=str(files / "run.trec"), **given)
    inside = [json.dumps({"_id": q, "text": "?", "metadata": {"answers": a}}) for q, a in answers.items()]
    (files / "asked.jsonl").write_text("\n".join(inside))
    assert read_answers(files / "asked.jsonl") == answers
    (files / "asked.jsonl").write_text('{"_id": "q1", "metadata": {"answers": []}}\n')
    with pytest.raises(UserError, match=r"asked.jsonl:1: 'answers' is empty, but a query is judged by"):
        read_answers(files / "asked.jsonl")
    (files / "answers.jsonl").write_text('{"_id": "q1", "answers": "x"}\n')
    with pytest.raises(UserError, match=r"answers.jsonl:1: 'answers' is not a list of texts"):
        evaluate(run=str(files / "run.trec"), **given)
