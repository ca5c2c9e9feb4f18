"""A flag that nothing would read is refused, before anything is read or written."""

import re
from pathlib import Path

import pytest

from jaxir import cli
from jaxir.evaluation.sts_files import has_splits

PAIRS = "score\tsentence1\tsentence2\n1\ta\tb\n2\tc\td\n"
IDLE = [
    (
        "evaluate",
        "--model=absent --dataset=sts:{here}/set.tsv --split=dev",
        "--split is for data that have splits",
    ),
    (
        "evaluate",
        "--model=absent --dataset=sts:{here}/parts --split=dev",
        "--split is for data that have splits, a folder of tasks (of one give the file, as sts:STSB/sts-dev",
    ),
    ("evaluate", "--model=absent --dataset=sts:{here} --split=dev", "--split is for data that have splits"),
    (
        "analyze",
        "--models=absent --dataset=sts:{here}/set.tsv --output={here}/out --split=dev",
        "--split is for beir: ",
    ),
    (
        "analyze",
        "--models=absent --dataset=texts:{here}/set.tsv --output={here}/out --seed=1",
        "--seed is for beir: ",
    ),
    ("search", "--index=absent --query=why --on_bad_input=skip", "--on_bad_input is for --queries"),
    (
        "mine",
        "--run=absent --dataset=beir:absent --output={here}/out --sampling=top --seed=1",
        "--seed is for --sampling=ran",
    ),
    (
        "expand",
        "--model=absent --input=absent --output={here}/out --num_beams=2 --seed=1",
        "--seed is for sampling",
    ),
    (
        "prepare",
        "--dataset=pairs:absent --output={here}/out --data_dir=absent",
        "--data_dir is for published data sets",
    ),
    (
        "prepare",
        "--dataset=pairs:absent --output={here}/out --with_context=no",
        "--with_context is for published data sets",
    ),
    ("prepare", "--dataset=nq:absent --output={here}/out --seed=1", "--seed is for --dataset=pairs:FILE"),
    (
        "fuse",
        "--runs=a,b --method=rescore --alpha=1 --model=absent --output={here}/out",
        "--model is for --embeddings",
    ),
    ("serve", "--index=absent --port=0 --rerank_depth=3", "--rerank_depth is for --reranker"),
    (
        "index",
        "--embeddings=absent --output={here}/out --on_bad_input=skip",
        "--on_bad_input is for --backend=lucene",
    ),
    (
        "index",
        "--update=absent --delete=absent --on_bad_input=skip",
        "--on_bad_input is for the --corpus of a lucene",
    ),
]


@pytest.mark.parametrize(("command", "flags", "sentence"), IDLE)
def test_a_flag_that_nothing_reads_is_refused(command, flags, sentence, tmp_path, capsys):
    (tmp_path / "parts").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"parts/sts-{split}.csv").write_text("g\tf\ty\t1\t1\ta\tb\ng\tf\ty\t2\t5\tc\td\n")
    (tmp_path / "set.tsv").write_text(PAIRS)
    before = sorted(tmp_path.rglob("*"))
    function = "jaxir.expand:generate" if command == "expand" else f"jaxir.{command}:{command}"
    assert cli.main(function, flags.format(here=tmp_path).split(" ")) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {sentence}") and told.endswith(": leave it out\n"), told
    assert sorted(tmp_path.rglob("*")) == before


def test_only_a_folder_of_tasks_has_splits_of_rated_pairs(tmp_path):
    """Otherwise nothing could be evaluated on the dev splits of those that have some."""
    (tmp_path / "STSBenchmark").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"STSBenchmark/sts-{split}.csv").touch()
    assert has_splits(tmp_path) and not has_splits(tmp_path / "STSBenchmark")
    (tmp_path / "STSBenchmark" / "other.tsv").touch()
    assert not has_splits(tmp_path)


def test_pages_give_a_split_to_no_task_alone():
    pages = [page.read_text() for page in (Path(__file__).parent.parent.parent / "docs").rglob("*.md")]
    of_files = [
        x for page in pages for x in re.findall(r"--dataset=sts:(\S+)( --split\S*)?", page) if "STSB" in x[0]
    ]
    assert len(of_files) >= 3 and not any(split for _, split in of_files)
