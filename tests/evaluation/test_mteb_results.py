"""`evaluate --mteb`: comparing results that MTEB wrote (tests/golden/make_mteb.py)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.evaluate import evaluate
from jaxir.evaluation.significance import compare, holm

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "mteb"
QRELS = str(GOLDEN / "qrels")


def compared(**changes) -> dict:
    how = {"mteb": f"ours={GOLDEN / 'minilm'}", "baseline": f"theirs={GOLDEN / 'bert'}", "qrels": QRELS}
    return evaluate(**how | changes)


def test_each_task_is_tested_over_its_queries_and_the_mean_over_tasks(capsys):
    report = compared(per_query=True)
    by_task = {found["part"]["task"]: found for found in report["comparisons"]}
    searched = by_task["LocalRetrieval"]
    ours, theirs = searched["per_query"]
    assert len(ours) == 12 and searched["metric"] == "nDCG@10"
    assert np.mean(list(ours.values())) == pytest.approx(0.67533, abs=6e-6), "the score in MTEB's file"
    expected = compare(ours, theirs)
    assert (searched["t_test"], searched["randomisation"]) == (expected.t_test, expected.randomisation)
    across = compare(
        {task: found["system"] for task, found in by_task.items()},
        {task: found["baseline"] for task, found in by_task.items()},
    )
    assert report["across_tasks"]["randomisation"] == across.randomisation == 0.125
    said = capsys.readouterr().out
    assert "MTEB's main scores of ours and theirs (baseline)" in said
    missing = "not tested, no rankings of either model in the folders: LocalClassification, LocalClustering"
    assert missing in said
    assert "| LocalRetrieval      | 0.1857 | 0.6753 |     0.4896 |      12 |" in said
    assert "| 4 tasks   |" in said and "| LocalRetrieval | q52   |" in said


def test_p_values_are_corrected_for_the_tested_tasks(tmp_path):
    """The second task has the rankings of half of the queries."""
    for name in ("minilm", "bert"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
        result = next((tmp_path / name).rglob("LocalRetrieval.json"))
        content = json.loads(result.read_text()) | {"task_name": "Other"}
        result.with_name("Other.json").write_text(json.dumps(content))
        predictions = next((tmp_path / name).rglob("LocalRetrieval_predictions.json"))
        shutil.copy(predictions, predictions.with_name("Other_predictions.json"))
    shutil.copytree(QRELS, tmp_path / "qrels")
    shutil.copy(tmp_path / "qrels" / "LocalRetrieval.tsv", tmp_path / "qrels" / "Other.tsv")
    places = {"mteb": str(tmp_path / "minilm"), "baseline": str(tmp_path / "bert")}
    found = compared(**places, qrels=str(tmp_path / "qrels"))["comparisons"]
    tested = [row for row in found if row["comparison"]]
    assert [row["part"]["task"] for row in tested] == ["LocalRetrieval", "Other"]
    for test in ("t_test", "randomisation"):
        alone = [row["comparison"][test] for row in tested]
        assert [row[test] for row in tested] == holm(alone) == [2 * alone[0], 2 * alone[1]]


def test_results_and_predictions_may_be_in_two_folders(tmp_path, capsys):
    shutil.copytree(GOLDEN / "minilm" / "results", tmp_path / "results")
    alone = compared(mteb=str(tmp_path / "results"))
    assert all(found["comparison"] is None for found in alone["comparisons"])
    said = capsys.readouterr().out
    assert "no task is tested by itself" in said
    assert "no rankings of sentence-transformers/all-MiniLM-L6-v2 in the folders: LocalRetrieval" in said
    both = compared(mteb=f"{tmp_path / 'results'}+{GOLDEN / 'minilm' / 'predictions'}")
    assert sum(found["comparison"] is not None for found in both["comparisons"]) == 1
    # Predictions of another model are not used.
    others = compared(mteb=f"{tmp_path / 'results'}+{GOLDEN / 'bert' / 'predictions'}")
    assert all(found["comparison"] is None for found in others["comparisons"])


def test_models_of_one_name_are_told_apart_by_revision(capsys):
    compared(mteb=str(GOLDEN / "bert"), baseline=str(GOLDEN / "bert"))
    assert "MTEB's main scores of jaxir/bert@1 and jaxir/bert@2 (baseline)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"baseline": None}, "--mteb compares two models: give --baseline=DIR"),
        ({"mteb": "absent"}, "absent: no such directory; give a folder of MTEB's results"),
        ({"mteb": QRELS}, r"qrels: no results of MTEB \(TASK\.json\) in it"),
        ({"mteb": str(GOLDEN)}, "has results of several models or revisions: give one of .*jaxir__bert"),
        ({"metrics": "RR@10"}, "--metrics only applies to retrieval"),
    ],
)
def test_unusable_results_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        compared(**changes)


def test_models_without_a_common_task_are_refused(tmp_path):
    for file in (GOLDEN / "bert").rglob("LocalSTS.json"):
        shutil.copy(file, tmp_path / "Other.json")
        content = json.loads(file.read_text()) | {"task_name": "Other"}
        (tmp_path / "Other.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="have no task in common"):
        compared(baseline=str(tmp_path))
