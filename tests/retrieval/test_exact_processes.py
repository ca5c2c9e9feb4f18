"""`python -m jaxir.search` started on two machines: each reads half of the vectors, both have all answers."""

import os

import numpy as np
import pytest

from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.ranking.runs import read_run

pytestmark = pytest.mark.slow

COUNT, K = 500, 20


@pytest.mark.timeout(300)
def test_two_processes_answer_as_one(tmp_path, toy, small_model, encoder):
    """In each process's copy of the index, the rows of the other process are NaN."""
    texts = toy.random_texts(COUNT // 2, seed=11)
    # Each vector twice, so that scores tie.
    vectors = np.repeat(encoder.encode_passages(texts, show_progress=False), 2, axis=0)
    ids = [f"d{i}" for i in np.random.default_rng(0).permutation(COUNT)]
    facts = {
        "fingerprint": encoder.fingerprint,
        "model": small_model,
        "similarity": encoder.similarity_fn_name,
    }
    folders = [tmp_path / name for name in ("alone", "first", "second")]
    for folder in folders:
        folder.mkdir()
        ExactIndex.build(vectors, ids, **facts).save(folder / "index")
        toy.write_queries(folder / "queries.jsonl", toy.random_texts(7, seed=12))
    half = COUNT // 2 + 6  # rounded up to whole blocks of 64 rows for each of two devices
    for folder, other in ((folders[1], slice(half, None)), (folders[2], slice(0, half))):
        stored = np.load(folder / "index" / "embeddings.npy", mmap_mode="r+")
        stored[other] = np.nan
        stored.flush()
        (folder / "index" / "SHA256SUMS").unlink()  # the checksums would report the changed rows
    devices = "--xla_force_host_platform_device_count=2" + os.environ["JAXIR_QUICK_XLA_FLAGS"]
    flags = ["--index=index", "--queries=queries.jsonl", "--output=run.trec", f"--k={K}"]
    how = {"NPROC": "16", "XLA_FLAGS": devices}
    ((code, _, error),) = toy.run_processes("search", *flags, folders=folders[:1], **how)
    assert code == 0, error
    first, second = toy.run_processes("search", *flags, folders=folders[1:], **how)
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
