"""Candidates over an index of vectors: a kill in the middle, and two processes that share the questions."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxir import cli
from jaxir.data.expanded.candidates import read_candidates
from jaxir.evaluation.query_candidates import WINDOW as SEARCHED
from jaxir.retrieval.ranking.query_choice import WINDOW as RERANKED

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
QUESTIONS = 2 * RERANKED + 1  # windows of both commands for either process
pytestmark = pytest.mark.slow


def words(number: int) -> str:
    """Letters that tell one number from others."""
    return " ".join("abcdefghij"[int(digit)] for digit in str(number))


@pytest.fixture
def folder(tmp_path):
    def write(name, records):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    write("corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": f"{words(i)} k"} for i in range(40)])
    write("queries.jsonl", [{"_id": f"q{i}", "text": f"{words(i)}?"} for i in range(QUESTIONS)])
    write(
        "made.jsonl",
        [{"_id": f"q{i}", "outputs": [words(i * 7 + n) for n in range(3)]} for i in range(QUESTIONS)],
    )
    write("answers.jsonl", [{"_id": f"q{i}", "answers": [words(i % 40)]} for i in range(QUESTIONS)])
    model = f"st:{GOLDEN / 'bert'}"
    encode = [f"--model={model}", f"--input={tmp_path}/corpus.jsonl", f"--output={tmp_path}/vectors"]
    assert cli.main("jaxir.encode:encode", encode) == 0
    index = [f"--embeddings={tmp_path}/vectors", "--backend=exact", f"--corpus={tmp_path}/corpus.jsonl"]
    assert cli.main("jaxir.index:index", [*index, f"--output={tmp_path}/index"]) == 0
    reranker = shutil.copytree(GOLDEN / "cross_bert", tmp_path / "reranker")
    config = json.loads((reranker / "config.json").read_text()) | {
        "jaxir_reads": "expanded_query_and_passage"
    }
    (reranker / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_resumed_and_shared_candidates_equal_those_of_one_process(folder, capsys):
    def retrieve(name: str) -> list[str]:
        given = [f"--{what}={folder}/{what}.jsonl" for what in ("queries", "answers")]
        given += [f"--expansions={folder}/made.jsonl", f"--index={folder}/index", "--depth=10"]
        return ["retrieve", *given, f"--output={folder}/{name}"]

    def rerank(name: str) -> list[str]:
        given = [f"--candidates={folder}/whole.jsonl", f"--corpus={folder}/corpus.jsonl"]
        return ["rerank", *given, f"--model=hf:{folder}/reranker", f"--output={folder}/{name}"]

    def started(flags: list[str], **more: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "jaxir.expand", *flags], env=os.environ | more)

    for command, *flags in (retrieve("whole.jsonl"), rerank("best.jsonl")):
        assert cli.main(f"jaxir.expand:{command}", flags) == 0
    found = list(read_candidates(folder / "whole.jsonl"))
    assert len(found) == QUESTIONS and len({tuple(some.passages) for some in found}) > 10
    assert {1, None} < {rank for some in found for rank in some.ranks}

    process, unfinished = started(retrieve("cut.jsonl")), folder / ".cut.jsonl.unfinished"
    while process.poll() is None and not list(unfinished.glob("outputs-*")):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (folder / "cut.jsonl").exists()
    before = {path: path.stat().st_mtime_ns for path in unfinished.glob("outputs-*")}
    assert 0 < len(before) < -(-QUESTIONS // SEARCHED)
    # Two take up what one began.
    for flags, name, whole in (
        (retrieve("cut.jsonl"), "cut.jsonl", "whole.jsonl"),
        (rerank("both.jsonl"), "both.jsonl", "best.jsonl"),
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            run = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
        pair = [started(flags, **run, JAX_PROCESS_ID=str(i)) for i in range(2)]
        assert [process.wait(200) for process in pair] == [0, 0]
        assert (folder / name).read_bytes() == (folder / whole).read_bytes()
    for command, *flags in (retrieve("cut.jsonl"), rerank("both.jsonl")):
        assert cli.main(f"jaxir.expand:{command}", flags) == 0
        assert "is complete, nothing to do" in capsys.readouterr().out
    assert not list(folder.glob(".*")), "nothing is left beside the outputs"
