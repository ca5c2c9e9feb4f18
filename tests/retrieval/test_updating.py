"""Documents added to an index directory and deleted, by the command, for every engine that can."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from jaxir.retrieval.indexes.base_index import build_index, load_index
from jaxir.retrieval.indexes.scann_index import BRUTE_FORCE_UP_TO, ScannIndex
from jaxir.retrieval.indexes.updating import update_index
from jaxir.sidecar import environment

BACKENDS = ["exact", "scann", "milvus"]
GONE = ["d0", "d7", "d39"]
QUERIES = np.random.default_rng(0).normal(size=(20, 32)).astype(np.float32)


def index_command(*flags: str) -> int:
    return cli.main("jaxir.index:index", flags)


@pytest.fixture(scope="module")
def root(tmp_path_factory, toy, small_model) -> Path:
    """40 documents in old.jsonl and 8 others in new.jsonl, whose vectors are in old/ and new/."""
    root = tmp_path_factory.mktemp("updating")
    texts = toy.random_texts(48, seed=3, max_words=20)
    for name, numbers in (("old", range(40)), ("new", range(40, 48))):
        records = [{"_id": f"d{i}", "title": f"title {i}", "text": f"{texts[i]} é {i}"} for i in numbers]
        corpus = toy.write_jsonl(root / f"{name}.jsonl", records)
        toy.encode(small_model, corpus, root / name)
    (root / "gone.txt").write_text("".join(f"{doc_id}\n" for doc_id in GONE))
    return root


def built(root: Path, tmp_path: Path, backend: str, *, corpus: bool = True) -> Path:
    index = build_index(open_embeddings(root / "old"), backend=backend)
    index.save(tmp_path / "index", corpus=root / "old.jsonl" if corpus else None)
    index.close()
    return tmp_path / "index"


def fingerprint(directory: Path) -> dict[str, str]:
    files = sorted(p for p in directory.rglob("*") if p.is_file() and "wal" not in p.parts)
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_are_deleted_added_and_replaced(root, tmp_path, toy, backend, capsys):
    directory = built(root, tmp_path, backend)
    flags = [f"--update={directory}", f"--embeddings={root}/new", f"--corpus={root}/new.jsonl"]
    assert index_command(*flags, f"--delete={root}/gone.txt") == 0
    assert f"{backend} index of 45 passages (8 added, 3 deleted)" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["index"], "no temporary files are left"
    old, new = open_embeddings(root / "old"), open_embeddings(root / "new")
    kept = [i for i, doc_id in enumerate(old.ids) if doc_id not in GONE]
    vectors, ids = np.concatenate([old.shards[0][kept], *new.shards]), [old.ids[i] for i in kept] + new.ids
    expected_scores, expected_found = toy.nearest(vectors, ids, QUERIES, 45)
    index = load_index(directory)
    assert sorted(index.ids) == sorted(ids) and index.info.count == 45
    scores, found = index.search(QUERIES, 45)
    assert found == expected_found
    np.testing.assert_allclose(scores, expected_scores, atol=1e-5)
    for i in set(range(48)).difference(int(doc_id[1:]) for doc_id in GONE):
        document = index.documents[f"d{i}"]
        assert document.title == f"title {i}" and document.text.endswith(f" é {i}")
    index.close()

    replaced = tmp_path / "replaced.txt"
    replaced.write_text("\ufeffd41\r\n\nd47\r\nd40\nd42\nd43\nd44\nd45\nd46\n")
    corpus = tmp_path / "again.jsonl"
    corpus.write_text((root / "new.jsonl").read_text().replace('"title 4', '"newer 4'))
    flags = [f"--update={directory}", f"--embeddings={root}/new", f"--corpus={corpus}"]
    assert index_command(*flags, f"--delete={replaced}") == 0
    index = load_index(directory)
    assert index.search(QUERIES, 45)[1] == expected_found
    assert index.documents["d47"].title == "newer 47" and index.documents["d38"].title == "title 38"
    index.close()


def test_refused_update_changes_nothing(root, tmp_path, toy, capsys):
    directory = built(root, tmp_path, "exact")
    before = fingerprint(directory)
    shutil.copytree(root / "new", tmp_path / "other")
    described = json.loads((root / "new" / "embeddings.json").read_text()) | {"fingerprint": "f" * 64}
    (tmp_path / "other" / "embeddings.json").write_text(json.dumps(described))
    (tmp_path / "other" / "SHA256SUMS").unlink()
    (tmp_path / "unknown.txt").write_text("d1\nx4\nx3\nx2\nx1\nx5\n")
    (tmp_path / "all.txt").write_text("".join(f"d{i}\n" for i in range(40)))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    partial = toy.write_jsonl(tmp_path / "partial.jsonl", [{"_id": "d40", "text": "x"}])
    new, corpus = f"--embeddings={root}/new", f"--corpus={root}/new.jsonl"
    for change, sentence in (
        ([f"--embeddings={root}/old", corpus], "documents 'd0', 'd1', 'd10' and 37 more are already in"),
        ([f"--delete={tmp_path}/unknown.txt"], "no documents 'x1', 'x2', 'x3' and 2 more in the index to"),
        ([f"--delete={tmp_path}/all.txt"], "no document would be left"),
        ([f"--delete={tmp_path}/binary.txt"], "binary.txt is not UTF-8 text"),
        ([f"--embeddings={tmp_path}/other", corpus], "the embeddings cannot be added to"),
        ([new], "stores titles and texts: give the new documents' titles and texts"),
        ([new, f"--corpus={partial}"], "lacks 7 of the 8 documents that were encoded"),
        ([corpus], "--corpus needs --embeddings of the documents to add"),
    ):
        assert index_command(f"--update={directory}", *change) == 1, change
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1, error
        assert fingerprint(directory) == before, change
    assert index_command(f"--update={root}", new) == 1
    assert "is not an index" in capsys.readouterr().err
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert index_command(f"--update={directory}", f"--delete={root}/gone.txt") == 1
    assert "is being changed by another process" in capsys.readouterr().err
    os.close(descriptor)
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".part")]


def test_update_refuses_vectors_of_the_other_tower(root, tmp_path, toy, small_model, capsys):
    directory = built(root, tmp_path, "exact")
    before = fingerprint(directory)
    toy.encode(small_model, root / "new.jsonl", tmp_path / "queries", "--tower=query")
    update = [f"--update={directory}", f"--embeddings={tmp_path}/queries", f"--corpus={root}/new.jsonl"]
    assert index_command(*update) == 1
    error = capsys.readouterr().err
    assert "are from the query tower, but the index is from the passage tower" in error
    assert "encode the new documents with --tower=passage" in error and error.count("\n") == 1
    assert fingerprint(directory) == before

    # Older indexes do not name their tower and accept vectors of both.
    described = json.loads((directory / "index.json").read_text())
    assert described.pop("tower") == "passage"
    (directory / "index.json").write_text(json.dumps(described))
    (directory / "SHA256SUMS").unlink()
    assert index_command(*update) == 0
    assert load_index(directory).info.count == 48


def test_update_refuses_a_corpus_for_an_index_without_documents(root, tmp_path, capsys):
    directory = built(root, tmp_path, "scann", corpus=False)
    flags = [f"--update={directory}", f"--embeddings={root}/new"]
    assert index_command(*flags, f"--corpus={root}/new.jsonl") == 1
    assert "stores no titles and texts: leave out --corpus" in capsys.readouterr().err
    assert index_command(*flags) == 0
    index = load_index(directory)
    assert index.documents is None and index.info.count == 48


@pytest.mark.slow
def test_update_measures_the_recall_of_a_tuned_index(root, tmp_path):
    stored = open_embeddings(root / "new")
    vectors = np.random.default_rng(0).normal(size=(BRUTE_FORCE_UP_TO + 100, 32)).astype(np.float32)
    ids = [f"v{i}" for i in range(len(vectors))]
    index = ScannIndex.build(vectors, ids, fingerprint=stored.info.fingerprint)
    assert not index.tuned and index.with_settings(reorder=201).tuned
    index.with_settings(leaves_to_search=20, reorder=50).save(tmp_path / "index")
    change = update_index(tmp_path / "index", embeddings=stored, delete=["v5", "v9"])
    assert (change.count, change.added, change.deleted) == (len(vectors) + 6, 8, 2)
    assert 0.2 < change.recall.value < 0.95 and f"recall@10 {change.recall.value:.4f}" in str(change)


def test_lucene_documents_are_added_and_deleted(root, tmp_path, toy, capsys):
    if environment.installed() is None:
        pytest.skip(f"no environment in {environment.directory()} (`make sidecar` installs it)")
    corpora = {}
    a, c = {"_id": "a", "title": "A", "text": "cats milk"}, {"_id": "c", "text": "cats and cats"}
    for name, records in {
        "old": [a, {"_id": "b", "text": "dogs milk"}],
        "new": [c, {"_id": "blank", "text": ""}],
        "both": [a, c],
    }.items():
        corpora[name] = toy.write_jsonl(tmp_path / f"{name}.jsonl", records)
    directory = tmp_path / "index"
    for name in ("old", "both"):
        output = directory if name == "old" else tmp_path / "both"
        assert index_command("--backend=lucene", f"--corpus={corpora[name]}", f"--output={output}") == 0
    (tmp_path / "gone.txt").write_text("b\n")
    flags = [f"--update={directory}", f"--corpus={corpora['new']}"]
    assert index_command(*flags, f"--delete={tmp_path}/gone.txt") == 0
    assert "lucene index of 2 passages (1 added, 1 deleted)" in capsys.readouterr().out
    changed, fresh = load_index(directory), load_index(tmp_path / "both")
    for found, expected in zip(changed.search(["cats milk"], 5), fresh.search(["cats milk"], 5), strict=True):
        np.testing.assert_array_equal(found, expected, "the statistics of a fresh index")
    assert changed.documents["c"].text == "cats and cats" and changed.documents["a"].title == "A"
    for more, sentence in (
        (flags[1:], "document 'c' is already in the index"),
        ([f"--embeddings={root}/new"], "is a BM25 index: give --corpus, not --embeddings"),
        ([f"--delete={tmp_path}/gone.txt"], "there is no document 'b' in the index"),
    ):
        assert index_command(f"--update={directory}", *more) == 1
        assert sentence in capsys.readouterr().err


def test_a_killed_update_leaves_the_old_index_whole(root, tmp_path):
    """The update is killed while it waits for the rest of the corpus, so its files are incomplete."""
    directory = built(root, tmp_path, "exact")
    before, expected = fingerprint(directory), load_index(directory).search(QUERIES, 5)[1]
    os.mkfifo(tmp_path / "pipe.jsonl")
    command = [sys.executable, "-m", "jaxir.index", f"--update={directory}", f"--embeddings={root}/new"]
    with subprocess.Popen([*command, f"--corpus={tmp_path}/pipe.jsonl"]) as process:
        with (tmp_path / "pipe.jsonl").open("wb") as pipe:
            pipe.write((root / "new.jsonl").read_bytes()[:300])
            pipe.flush()
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob(".index.*.part/documents.jsonl")) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert list(tmp_path.glob(".index.*.part/documents.jsonl"))
            process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    assert fingerprint(directory) == before
    assert load_index(directory).search(QUERIES, 5)[1] == expected
    assert index_command(f"--update={directory}", f"--delete={root}/gone.txt") == 0


def test_open_index_keeps_its_documents_after_an_update(root, tmp_path):
    """The documents of an open index come from the old file, whatever the offsets in the new file."""
    directory = built(root, tmp_path, "exact")
    index = load_index(directory)
    wanted = {doc_id: index.documents[doc_id] for doc_id in index.ids}
    assert index_command(f"--update={directory}", f"--delete={root}/gone.txt") == 0
    assert not list(tmp_path.glob(".index.*"))  # the old directory is removed
    assert {doc_id: index.documents[doc_id] for doc_id in index.ids} == wanted
    assert load_index(directory).ids == [i for i in index.ids if i not in GONE]
