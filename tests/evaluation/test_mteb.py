"""`jaxir.mteb`: real MTEB, in the environment of `make mteb`, evaluates models on tasks with local data."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import jaxir
from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.evaluate import evaluate
from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.retrieval_metrics import evaluate_run
from tests.beir_folder import write_folder
from tests.interop.folders import change, module_folder

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".mteb" / "bin" / "python"


PROMPTS = {"query": "q: ", "document": "d: ", "STS": "alike: ", "LocalRetrieval-query": "find: "}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mteb")


@pytest.fixture(scope="module")
def found(place, minilm_folder) -> dict:
    """The results that `local_mteb`, run in another process, prints."""
    if not PYTHON.exists():
        pytest.skip("MTEB is not installed: run `make mteb`")
    beir = write_folder(place / "beir", held_out=12)
    prompted = module_folder("router", place)
    change(prompted / "config_sentence_transformers.json", prompts=PROMPTS, default_prompt_name=None)
    command = [PYTHON, "-m", "tests.evaluation.local_mteb", beir, place / "out", minilm_folder]
    done = subprocess.run(
        [*map(str, command), f"st:{prompted}"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_without_mteb_the_error_says_how_to_install_it(tmp_path, capsys):
    with pytest.raises(UserError, match=r"the package mteb is not installed; run: .*\[mteb\]"):
        jaxir.mteb.load("all-MiniLM-L6-v2")
    flags = ["--model=all-MiniLM-L6-v2", f"--output={tmp_path / 'out'}"]
    assert cli.main("jaxir.mteb:mteb", flags) == 1
    assert "give either --tasks" in capsys.readouterr().err


@pytest.mark.slow
def test_scores_equal_jaxirs_and_sentence_transformers(found, place):
    """All tasks' scores equal sentence-transformers', and nDCG@10 equals that of `jaxir.evaluate`."""
    ours, theirs = found["scores"]
    folder = place / "beir"
    assert ours == pytest.approx(theirs, abs=1e-4) and len(ours) == 4
    report = evaluate(model="all-MiniLM-L6-v2", dataset=f"beir:{folder}")
    (file,) = (place / "out" / "0").rglob("LocalRetrieval_predictions.json")
    ranked = json.loads(file.read_text())["default"]["test"]
    judged = read_judgements(folder / "qrels" / "test.tsv")
    values = evaluate_run(ranked, judged, "nDCG@10").per_query["nDCG@10"]
    expected = report["per_query"]["nDCG@10"]
    np.testing.assert_allclose([values[q] for q in expected], list(expected.values()), atol=1e-6)
    # MTEB rounds to 5 decimals.
    assert ours["LocalRetrieval"] == pytest.approx(report["metrics"]["nDCG@10"], abs=6e-6)


@pytest.mark.slow
def test_prompts_follow_mtebs_rules(found):
    plain, instructed = found["prompts"]
    # (tower, prompt, batch size) of a query, a document and another text: first in a search, then in an STS
    # task.
    assert plain == [
        *(["query", "find: ", 3], ["passage", "d: ", 3], [None, None, 3]),
        *(["query", "alike: ", 3], ["passage", "alike: ", 3], [None, "alike: ", 3]),
    ]
    of_search, of_sts = (
        f"Do: {instruction}: "
        for instruction in ("Retrieve text based on user query.", "Retrieve semantically similar text.")
    )
    assert instructed[:2] == [["query", of_search, 3], ["passage", "d: ", 3]]
    assert instructed[3:] == [["query", of_sts, 3], ["passage", "alike: ", 3], [None, of_sts, 3]]


@pytest.mark.slow
def test_vectors_equal_sentence_transformers_for_all_arguments(found):
    apart = found["differences"]
    assert len(apart) == 14 and max(apart.values()) < 1e-5, apart
    assert all(apart[precision] == 0 for precision in ("int8", "uint8", "binary", "ubinary"))


@pytest.mark.slow
def test_judgements_are_those_of_mtebs_task(tmp_path):
    """MTEB's task reads a local folder with its data set's name and the hub's layout, if there is one."""
    if not PYTHON.exists():
        pytest.skip("MTEB is not installed: run `make mteb`")
    golden = ROOT / "tests" / "golden" / "mteb"
    places = {name: shutil.copytree(golden / name, tmp_path / name) for name in ("minilm", "bert")}
    for file in [file for place in places.values() for file in place.rglob("LocalRetrieval*.json")]:
        content = json.loads(file.read_text())
        content |= {"task_name": "NFCorpus"} if "task_name" in content else {}
        file.with_name(file.name.replace("LocalRetrieval", "NFCorpus")).write_text(json.dumps(content))
    judged = [line.split("\t") for line in (golden / "qrels/LocalRetrieval.tsv").read_text().splitlines()[1:]]
    rows = {
        "qrels": [{"query-id": q, "corpus-id": d, "score": int(score)} for q, d, score in judged],
        "queries": [{"_id": query, "text": query} for query, _, _ in judged],
        "corpus": [{"_id": document, "title": "", "text": document} for _, document, _ in judged],
    }
    data = tmp_path / "mteb" / "nfcorpus"
    data.mkdir(parents=True)
    configs = [
        ("default", "qrels", "test"),
        ("queries", "queries", "queries"),
        ("corpus", "corpus", "corpus"),
    ]
    metadata = ["---", "configs:"]
    for name, file, split in configs:
        (data / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[file]))
        metadata += [f"- config_name: {name}", f"  data_files: [{{split: {split}, path: {file}.jsonl}}]"]
    (data / "README.md").write_text("\n".join([*metadata, "---", ""]))
    command = [PYTHON, "-m", "jaxir.evaluate", f"--mteb={places['minilm']}", f"--baseline={places['bert']}"]
    done = subprocess.run(
        [*map(str, command), "--output=report.json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["comparisons"]
    by_task = {row["part"]["task"]: row for row in rows}
    expected = evaluate(
        mteb=str(golden / "minilm"), baseline=str(golden / "bert"), qrels=str(golden / "qrels")
    )["comparisons"]
    (judged_here,) = (row for row in expected if row["part"]["task"] == "LocalRetrieval")
    found = by_task["NFCorpus"]
    assert found["metric"] == judged_here["metric"] and found["per_query"] == [*judged_here["per_query"]]
    assert [*found["per_query"][0]] == sorted(found["per_query"][0]), "MTEB's own order is random"
    for key in ("t_test", "randomisation"):
        assert found[key] == pytest.approx(judged_here[key]), key
    assert by_task["LocalRetrieval"]["comparison"] is None
    assert "MTEB knows no task, subset or split of this name: give --qrels" in done.stdout
