"""`python -m jaxir.search` started on two machines: each reads half of the vectors, both have all answers."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.ranking.runs import read_run

pytestmark = pytest.mark.slow

COUNT, K = 500, 20


def search(folders, *flags: str) -> list[subprocess.Popen]:
    """Starts the command in each of the folders, as one run where there are several."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "NPROC": "16",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2" + os.environ["JAXIR_QUICK_XLA_FLAGS"],
    }
    if len(folders) > 1:
        settings |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(len(folders))}
    env = os.environ | settings
    return [
        subprocess.Popen(
            [sys.executable, "-m", "jaxir.search", "--index=index", *flags],
            cwd=folder,
            env=env | ({"JAX_PROCESS_ID": str(number)} if len(folders) > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]


def finish(processes) -> list[tuple[int, str, str]]:
    try:
        told = [process.communicate(timeout=200) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.timeout(300)
def test_two_processes_answer_as_one(tmp_path, toy, small_model, encoder):
    """In each one's copy of the index the rows that the other one searches are no vectors at all."""
    texts = toy.random_texts(COUNT // 2, seed=11)
    vectors = np.repeat(encoder.encode_passages(texts, show_progress=False), 2, axis=0)  # each twice: ties
    ids = [f"d{i}" for i in np.random.default_rng(0).permutation(COUNT)]
    facts = {"fingerprint": encoder.fingerprint, "model": small_model, "similarity": encoder.similarity}
    questions = [{"_id": f"q{i}", "text": text} for i, text in enumerate(toy.random_texts(7, seed=12))]
    folders = [tmp_path / name for name in ("alone", "first", "second")]
    for folder in folders:
        folder.mkdir()
        ExactIndex.build(vectors, ids, **facts).save(folder / "index")
        toy.write_jsonl(folder / "queries.jsonl", questions)
    half = COUNT // 2 + 6  # rounded up to whole blocks of 64 rows for each of two devices
    for folder, other in ((folders[1], slice(half, None)), (folders[2], slice(0, half))):
        stored = np.load(folder / "index" / "embeddings.npy", mmap_mode="r+")
        stored[other] = np.nan
        stored.flush()
        (folder / "index" / "SHA256SUMS").unlink()  # which would tell
    flags = ["--queries=queries.jsonl", "--output=run.trec", f"--k={K}"]
    ((code, _, error),) = finish(search(folders[:1], *flags))
    assert code == 0, error
    first, second = finish(search(folders[1:], *flags))
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert "7 queries, 140 answers" in first[1] and "answers" not in second[1]
    assert not (folders[2] / "run.trec").exists(), "process 0 alone writes"
    expected, found = (read_run(folder / "run.trec") for folder in folders[:2])
    for query, answers in expected.items():
        assert list(found[query]) == list(answers)
        assert list(found[query].values()) == pytest.approx(list(answers.values()), abs=1e-6)
        assert len(set(answers.values())) <= K // 2 + 1, "guard: ties"
        rows = {ids.index(doc_id) < half for doc_id in answers}
        assert len(rows) == 2, "guard: both halves have answers"
