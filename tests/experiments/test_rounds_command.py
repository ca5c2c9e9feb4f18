import json
import shutil
import subprocess
import sys
from pathlib import Path

import gin
import pytest

from jaxir import cli
from jaxir.cli import gin_config
from jaxir.experiments import cell_runner
from jaxir.experiments import mining_rounds as room
from jaxir.experiments.experiment_settings import RoundSettings
from jaxir.retrieval.ranking.runs import read_run
from jaxir.train import train

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.mark.slow
@pytest.mark.long
def test_rounds_end_to_end(tmp_path, folder, rounds_flags):
    """Round 0 trains on negatives from another system's run, round 1 on negatives from its own run."""
    queries = [json.loads(line)["_id"] for line in (folder / "queries.jsonl").read_text().splitlines()]
    documents = [json.loads(line)["_id"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    ranked = (f"{q} Q0 {d} {n} {100 - n} bm25\n" for q in queries for n, d in enumerate(documents[:10], 1))
    (tmp_path / "bm25.trec").write_text("".join(ranked))

    def run(*more):
        first = f"--first_run={tmp_path}/bm25.trec"
        command = [sys.executable, "-m", "jaxir.rounds", *rounds_flags, first, *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=800)

    done = run()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("|")[1].strip(" -:") for line in lines] == ["round", "", "0", "1"]
    out = tmp_path / "out"
    made = ["embeddings", "index", "log.txt", "model", "negatives", "test.json", "train.trec"]
    assert sorted(p.name for p in (out / "round1").iterdir()) == made
    config = (out / "round1" / "model" / "config.gin").read_text()
    assert "round0/model" in config and "TevatronPairs" in config and "num_negatives = 2" in config
    first = (out / "round0" / "model" / "config.gin").read_text()
    assert "round0/negatives/train.jsonl" in first and "TevatronPairs" in first
    lines = (out / "round1" / "negatives" / "train.jsonl").read_text().splitlines()
    mined = [json.loads(line) for line in lines]
    found = read_run(out / "round1" / "train.trec")
    assert len(mined) == 40
    for record in mined:
        negatives = {p["docid"] for p in record["negative_passages"]}
        assert len(negatives) == 3 and negatives < found[record["query_id"]].keys()
        assert negatives.isdisjoint(p["docid"] for p in record["positive_passages"])

    made = (out / "round1" / "test.json").stat().st_mtime_ns
    again = run()
    assert again.returncode == 0 and again.stdout == done.stdout and "round" not in again.stderr
    assert (out / "round1" / "test.json").stat().st_mtime_ns == made
    other = run("--seed=1")
    assert other.returncode == 1 and "was started with" in other.stderr


def test_failed_command_is_named_and_finished_ones_are_kept(tmp_path, rounds_flags, no_rehearsal, capsys):
    out = tmp_path / "out"
    (out / "round0" / "model").mkdir(parents=True)
    (out / "round0" / "model" / "COMPLETE").touch()
    (out / "round0" / "test.json").touch()
    name = f"hf:{GOLDEN / 'cross_bert'}"
    reader = [f"--mine=cross_encoder={name},max_relevance=0.1"]
    assert cli.main("jaxir.rounds:rounds", [*rounds_flags, *reader]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[0] == "round1: jaxir.encode", "round 0 looks finished"
    assert "error: round1: jaxir.encode failed:" in error and f"(see {out}/round1/log.txt)" in error
    commands = (out / cell_runner.COMMANDS).read_text().splitlines()
    modules = [line.split()[2].removeprefix("jaxir.") for line in commands[2:]]
    assert modules == ["encode", "index", "search", "mine", "train", "evaluate"]
    assert f"--cross_encoder={name} --max_relevance=0.1" in commands[5]
    assert f"--model={out}/round0/model" in (out / "round1" / "log.txt").read_text()


def test_rounds_of_a_whole_recipe_train_on_mined_negatives(tmp_path, folder):
    given = {"recipe": ["gin/pairs.gin"], "dataset": f"beir:{folder}", "steps": 12, "seed": 5}
    given |= {"mine": ["last=20"], "backend": "exact", "bindings": ["NEGATIVES =2", "FROM_SCRATCH=True"]}
    settings = RoundSettings(**given)
    commands = [step.arguments for _, steps in room.steps_of(settings, tmp_path) for step in steps]
    training = [words for words in commands if "jaxir.train" in words]
    assert len(training) == 2
    for number, words in enumerate(training):
        files = [w.removeprefix("--gin_file=") for w in words if w.startswith("--gin_file=")]
        bindings = [w.removeprefix("--gin.") for w in words if w.startswith("--gin.")]
        gin_config.bind(train, files, bindings, {"seed": 5, "output_dir": "run"})
        bound = gin.get_bindings(train)
        assert (bound["steps"], bound["epochs"], bound["seed"]) == (12, None, 5)
        assert gin.query_parameter(f"{bound['objective'].loss.__name__}.temperature") == 0.05
        if number:
            assert bound["data"].path == f"{tmp_path}/round1/negatives/train.jsonl"
            assert bound["num_negatives"] == 2 and bound["model"].source == f"{tmp_path}/round0/model"
        else:
            assert bound["data"].directory == str(folder)
        assert bound["model"].from_scratch is (None if number else True)


def finish(out: Path) -> None:
    for number in (0, 1):
        here = out / f"round{number}"
        for made in ("index/index.json", "negatives/mining.json", "model/COMPLETE"):
            (here / made).parent.mkdir(parents=True, exist_ok=True)
            (here / made).touch()
        (here / "train.trec").write_text("q1 Q0 d1 1 1.0 t\nq2 Q0 d1 1 1.0 t\n")
        (here / "negatives" / "train.jsonl").write_text("{}\n{}\n")
        (here / "model" / "run.json").write_text('{"run": "1"}')
        values = {"q1": 1.0, "q2": 0.5}
        scores = {"metrics": {"P@1": 0.75, "RR": 0.75}, "per_query": {"P@1": values, "RR": values}}
        (here / "test.json").write_text(json.dumps(scores))


@pytest.mark.parametrize(("name", "called"), [("bert", "MODEL"), ("cross_bert", "cross_encoder")])
def test_rounds_refuse_changed_models(tmp_path, rounds_flags, capsys, name, called):
    for golden in ("bert", "cross_bert"):
        shutil.copytree(GOLDEN / golden, tmp_path / golden)
    last = f"--mine=last=20,cross_encoder=hf:{tmp_path / 'cross_bert'},max_relevance=0.1"
    more = f",MODEL=hf:{tmp_path / 'bert'}"
    bound = [flag + more if "--bindings" in flag else flag for flag in rounds_flags]
    finish(tmp_path / "out")
    assert cli.main("jaxir.rounds:rounds", [*bound, last]) == 0
    weights = tmp_path / name / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))  # changed content of the same size
    capsys.readouterr()
    assert cli.main("jaxir.rounds:rounds", [*bound, last]) == 1
    assert f"out was started when {called} had other content; give another" in capsys.readouterr().err
