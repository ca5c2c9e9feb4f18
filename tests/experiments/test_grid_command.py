import json
import subprocess
import sys

import pytest

from jaxir.interop import model_dir


@pytest.mark.slow
@pytest.mark.long
def test_grid_end_to_end(tmp_path, grid_flags):
    def run(*more):
        command = [sys.executable, "-m", "jaxir.grid", *grid_flags, "--sharing=ade_spl", *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=800)

    done = run("--objectives=pair")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    lines = done.stdout.splitlines()
    assert [word.strip() for word in lines[0].strip("|").split("|")] == ["Model", "Loss", "toy P@1", "toy RR"]
    assert lines[2].startswith("| ADE-SPL | PAIR |") and len(lines) == 3
    assert (out / "table.md").read_text() == done.stdout
    pair = out / "cells" / "toy-tiny-ade_spl-pair-seed0"
    made = ["commands.txt", "inputs.json", "log.txt", "model", "stage1", "test.json"]
    assert sorted(p.name for p in pair.iterdir()) == made
    config = (pair / "model" / "config.gin").read_text()
    assert "in_batch_softmax" in config and f"{pair.name}/stage1" in config
    assert [(pair / f"{run}/COMPLETE").read_text() for run in ("stage1", "model")] == ["12 steps\n"] * 2
    trained = model_dir.load(str(pair / "model"))
    assert trained.model.config.sharing == "ade_spl"
    numbers = json.loads((out / "results.json").read_text())
    scores = json.loads((pair / "test.json").read_text())
    (found,) = (s for s in numbers["scores"] if s["metric"] == "RR")
    assert found["mean"] == pytest.approx(scores["metrics"]["RR"])
    assert len(scores["per_query"]["RR"]) == 8

    for name in ("commands.txt", "inputs.json"):  # a run that a user trained by hand has no such files
        (pair / name).unlink()
    other = run("--objectives=pair", "--steps=20")
    assert other.returncode == 1 and other.stderr.count("\n") == 1
    assert "pair-seed0/stage1 was trained with train.steps = 12: give another output_dir" in other.stderr
    again = run("--objectives=pair")
    assert again.returncode == 0
    assert "1 of 1 cells are already finished" in again.stderr
    assert again.stdout == done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_grid_with_judges_untrained_model_and_run(tmp_path, folder, model):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("score\tsentence1\tsentence2\n5\ta cat\tcats\n1\ta cat\tthe table\n3\ta dog\ta cat\n")
    command = [sys.executable, "-m", "jaxir.grid", "--gin_file=gin/experiments/texts_grid.gin"]
    command += [f"--datasets=toy={folder}", f"--output_dir={tmp_path / 'out'}", "--steps=2", "--metrics=RR"]
    command += [f"--bindings=MODEL={model},STS={pairs},BATCH_SIZE=8,PASSAGE_LENGTH=8,QUERY_LENGTH=8"]
    command += ["--objectives=simcse", "--seeds=1,7", f"--untrained=BERT={model}"]

    def run(*more):
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=800)

    done = run()
    assert done.returncode == 0, done.stderr
    assert [word.strip() for word in done.stdout.split("|")[1:3]] == ["Loss", "toy RR"]
    questions = tmp_path / "tasks" / "TREC"
    questions.mkdir(parents=True)
    rows = [f"NUM:dist how far is cat {n} ?\nHUM:ind who is dog {n} ?\n" for n in range(12)]
    for name in ("train_5500.label", "TREC_10.label"):
        (questions / name).write_text("".join(rows))
    query, document = (folder / "qrels" / "test.tsv").read_text().splitlines()[1].split()[:2]
    (tmp_path / "bm25.trec").write_text(f"{query} Q0 {document} 1 1.0 bm25\n")
    judges = f"--judges=cats=sts:{pairs},tasks=senteval:{questions.parent}"
    judged = run(judges, f"--runs=BM25={tmp_path / 'bm25.trec'}")
    assert judged.returncode == 0, judged.stderr
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in judged.stdout.splitlines()[:5]]
    assert lines[0] == ["Loss", "toy RR", "toy cats Spearman", "toy tasks accuracy"]
    assert [line[0] for line in lines[2:]] == ["SimCSE", "BERT", "BM25"]
    # BM25 answers one of eight queries; the judges of models do not judge BM25's run file.
    assert [cell.strip("*") for cell in lines[4][1:]] == ["12.5", "-", "-"]
    cells = tmp_path / "out" / "cells"
    made = ["commands.txt", "inputs.json", "judge_cats.json", "judge_tasks.json", "log.txt", "test.json"]
    assert sorted(p.name for p in (cells / "toy-BERT").iterdir()) == made
    log = (cells / "toy-minilm-sde-simcse-seed7" / "log.txt").read_text()
    assert log.count("$ python -m jaxir.train") == 1  # finished results were kept when the judge was added
    assert log.count("$ python -m jaxir.evaluate") == 3
    value = json.loads((cells / "toy-BERT" / "judge_cats.json").read_text())["spearman"]["all"]
    assert lines[3][2].strip("*") == f"{value:.1f}"
    accuracy = json.loads((cells / "toy-BERT" / "judge_tasks.json").read_text())["average"]["accuracy"]
    assert lines[3][3].strip("*") == f"{accuracy:.1f}" and accuracy > 0
