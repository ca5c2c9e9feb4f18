"""From pairs to answers: the commands as real processes, with the loss that the documentation adds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
THINGS = ["harbour", "volcano", "violin", "glacier", "tractor", "compass", "lantern", "orchard"]
USES = ["is repaired in spring", "was painted by a child", "appears on an old stamp", "costs too much money"]
ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "XLA_FLAGS": "",
}


def write_beir(folder: Path) -> None:
    (folder / "qrels").mkdir(parents=True)
    names = [(t, u) for t in THINGS for u in USES]
    corpus = [{"_id": f"d{i}", "title": t, "text": f"A {t} that {u}."} for i, (t, u) in enumerate(names)]
    queries = [{"_id": f"q{i}", "text": f"which {t} {u}?"} for i, (t, u) in enumerate(names)]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    lines = "".join(f"q{i}\td{i}\t1\n" for i in range(len(names)))
    for split in ("train", "dev", "test"):
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")


def documented_files(folder: Path) -> None:
    """Writes the files of docs/adding_a_loss.md as its text names them."""
    text = (ROOT / "docs" / "adding_a_loss.md").read_text()
    for name, block in re.findall(r"`(\w+\.(?:py|gin))`[^`]*```(?:python|gin)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(block)


@pytest.fixture
def jaxir(tmp_path):
    def run(command: str, *flags: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", f"jaxir.{command}", *flags],
            cwd=tmp_path,
            env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_pairs_to_answers(jaxir, tmp_path):
    write_beir(tmp_path / "beir")
    documented_files(tmp_path)
    assert {"my_losses.py", "hinge.gin", "my_run.gin"} <= {p.name for p in tmp_path.iterdir()}
    settings = ["DATA=beir", "BATCH_SIZE=8", "STEPS=3", "MARGIN=0.9", "QUERY_LENGTH=16", "PASSAGE_LENGTH=16"]
    settings.append("Pretrained.scan_layers=True")  # one layer to compile, not six
    jaxir("train", "--gin_file=my_run.gin", "--output_dir=run", *(f"--gin.{s}" for s in settings))
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses
    assert all(0 < loss < 1.5 for loss in losses), losses
    assert "hinge.margin = %MARGIN" in (tmp_path / "run" / "config.gin").read_text()

    corpus = "--input=beir/corpus.jsonl"
    jaxir("encode", "--model=run", corpus, "--tower=passage", "--output=embeddings")
    jaxir(
        "index", "--embeddings=embeddings", "--corpus=beir/corpus.jsonl", "--backend=scann", "--output=index"
    )
    jaxir("search", "--index=index", "--queries=beir/queries.jsonl", "--k=10", "--output=run.trec")
    flags = ("--metrics=nDCG@10 RR@10", "--output=scores.json")
    table = jaxir("evaluate", "--run=run.trec", "--qrels=beir/qrels/test.tsv", *flags)
    direct = jaxir("evaluate", "--model=run", "--dataset=beir:beir", "--metrics=nDCG@10 RR@10")
    ours, theirs = (
        re.search(r"\|\s+([01]\.\d{4}) \|\s+([01]\.\d{4}) \|", t).groups() for t in (table, direct)
    )
    assert ours == theirs, "the index and exact search must agree on a corpus this small"
    assert float(ours[0]) > 0.5
