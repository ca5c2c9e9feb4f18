"""Indexes of every engine: exact answers and ties, ScaNN's recall, and files on disk."""

import dataclasses

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.retrieval.encoding.lengths import LONGEST
from jaxir.retrieval.indexes import exact
from jaxir.retrieval.indexes.base_index import load_index, normalize
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.milvus_index import MilvusIndex
from jaxir.retrieval.indexes.scann_index import BRUTE_FORCE_UP_TO, ScannIndex

ENGINES = [ExactIndex, ScannIndex, MilvusIndex]


def clustered(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(count // 50, dimension))
    points = centers[rng.integers(0, len(centers), count)] + 0.6 * rng.normal(size=(count, dimension))
    return normalize(points).astype(np.float32)


def test_equal_texts_tie_wherever_they_are(monkeypatch):
    """The same vector in different blocks and rows gets the same score, bit for bit."""
    monkeypatch.setattr(exact, "BLOCK", 128)
    vectors = clustered(500, 96)
    copies = [3, 77, 200, 201, 333, 499]
    vectors[copies] = vectors[3]
    ids = [f"{i:03d}" for i in range(500)]
    scores, found = ExactIndex.build(vectors, ids).search(vectors[3:4], 6)
    assert found == [[f"{i:03d}" for i in reversed(copies)]]
    assert len(set(scores[0].tolist())) == 1


def test_scann_finds_what_exact_finds():
    count = BRUTE_FORCE_UP_TO + 1000
    vectors = clustered(count, 32)
    noise = 0.05 * np.random.default_rng(1).normal(size=(200, 32))
    queries = normalize(vectors[:200] + noise).astype(np.float32)
    ids = [f"d{i}" for i in range(count)]
    near = ScannIndex.build(vectors, ids)
    assert "leaves" in near.info.settings
    expected_scores, expected = ExactIndex.build(vectors, ids).search(queries, 100)
    for k in (10, 100):
        scores, found = near.search(queries, k)
        recall = np.mean([len(set(a) & set(b[:k])) / k for a, b in zip(found, expected, strict=True)])
        assert recall >= 0.9
        same = np.array([a[0] == b[0] for a, b in zip(found, expected, strict=True)])
        assert same.mean() >= 0.95
        np.testing.assert_allclose(scores[same, 0], expected_scores[same, 0], atol=1e-5)
        assert (np.diff(scores) <= 0).all()
    found = near.search(queries[:2], count)[1]
    assert all(len(set(row)) == len(row) > 0.99 * count for row in found)


@pytest.mark.parametrize("engine", ENGINES)
def test_ties_are_broken_by_id(engine):
    vectors = np.tile(clustered(100, 16)[:4], (25, 1))
    ids = [f"d{i:03d}" for i in range(100)]
    _, found = engine.build(vectors, ids).search(vectors[:1], 25)
    assert found == [[f"d{i:03d}" for i in range(96, -1, -4)]]


@pytest.mark.parametrize("k", [1, 10, 300])
def test_fast_path_of_a_single_query_gives_the_same_answer(monkeypatch, k):
    """It does so without equal scores, with some, and with fewer documents than k."""
    vectors = np.concatenate([clustered(200, 16), np.tile(clustered(50, 16, seed=1)[:5], (10, 1))])
    index = ScannIndex.build(vectors, [f"d{i}" for i in range(len(vectors))])
    queries = [*clustered(200, 16)[:20], *vectors[-5:]]
    short = [index.search(query[None], k) for query in queries]
    in_order = [index._in_order(np.zeros(k, int), scores[0], k) for scores, _ in short]
    assert in_order.count(True) == {1: 25, 10: 20}.get(k, 0)
    monkeypatch.setattr(ScannIndex, "_in_order", lambda *_: False)
    for query, (scores, found) in zip(queries, short, strict=True):
        expected, names = index.search(query[None], k)
        np.testing.assert_array_equal(scores, expected)
        assert found == names and scores.dtype == expected.dtype == np.float32
    assert [found[0][0] for _, found in short[:20]] == [f"d{i}" for i in range(20)]


def test_all_engines_in_one_process():
    """TensorFlow (with ScaNN), pymilvus and JAX each load their own copies of the same native libraries."""
    vectors, ids = clustered(500, 16), [f"d{i}" for i in range(500)]
    indexes = [engine.build(vectors, ids) for engine in (MilvusIndex, ScannIndex, ExactIndex, MilvusIndex)]
    found = [index.search(vectors[:20], 3)[1] for index in (*indexes, *indexes[::-1])]
    assert all(answers == found[0] for answers in found)
    assert [answers[0] for answers in found[0]] == ids[:20]


def test_moved_index_answers_as_the_one_that_was_saved(tmp_path, toy):
    vectors, ids = clustered(200, 32), [f"id-{i}-é" for i in range(200)]
    index = ScannIndex.build(vectors, ids, fingerprint="f" * 64, model="st:somewhere")
    records = [{"_id": i, "title": f"title of {i}", "text": "text é\n" * n} for n, i in enumerate(ids)]
    records.append({"_id": "unknown", "text": "not indexed"})
    index.save(tmp_path / "saved", corpus=toy.write_jsonl(tmp_path / "corpus.jsonl", records[::-1]))
    moved = load_index((tmp_path / "saved").rename(tmp_path / "moved"))
    (scores, found), (expected_scores, expected) = (i.search(vectors[:5], 7) for i in (moved, index))
    assert found == expected and moved.info.model == "st:somewhere"
    np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
    assert moved.documents["id-3-é"] == ("id-3-é", "title of id-3-é", "text é\n" * 3, None)


def test_metadata_of_the_corpus_is_stored_and_updated(tmp_path, toy):
    kept = {"url": "https://example.org/é", "tags": ["x", 1], "half": "\ud800", "no number": float("nan")}
    records = [
        {"_id": "a", "title": "one", "text": "first", "metadata": kept},
        {"_id": "b", "text": "second", "metadata": {}},
        {"_id": "c", "text": "third", "metadata": "no object"},
    ]
    corpus = toy.write_jsonl(tmp_path / "corpus.jsonl", records)
    vectors = np.eye(3, 4, dtype=np.float32)
    ExactIndex.build(vectors, ["a", "b", "c"]).save(tmp_path / "index", corpus=corpus)
    new = toy.write_jsonl(tmp_path / "new.jsonl", [{"_id": "d", "text": "fourth", "metadata": {"page": 4}}])
    documents = load_index(tmp_path / "index").documents
    assert documents["a"] == ("a", "one", "first", kept | {"half": "?", "no number": None})
    assert documents["b"].metadata is documents["c"].metadata is None
    (tmp_path / "later").mkdir()
    Documents.write(tmp_path / "later", new, ["d", "a"], kept=documents, new=["d"])
    later = Documents.open(tmp_path / "later", ["d", "a"])
    assert later["a"] == documents["a"] and later["d"].metadata == {"page": 4}


@pytest.mark.parametrize("engine", ENGINES)
def test_search_takes_k_beyond_the_index_zeros_and_no_queries(engine):
    vectors = clustered(100, 8)
    vectors[7] = 0
    index = engine.build(vectors, [str(i) for i in range(100)])
    scores, found = index.search(vectors[6:8], 1000)
    assert scores.shape == (2, 100) and len(found[0]) == 100 and np.isfinite(scores).all()
    scores, found = index.search(np.zeros([0, 8], np.float32), 5)
    assert scores.shape[0] == 0 and found == []


def test_search_refuses_unsuitable_queries_and_models():
    vectors, ids = clustered(100, 8), [str(i) for i in range(100)]
    index = ExactIndex.build(vectors, ids, fingerprint="a" * 64, model="st:one")
    good = np.ones([2, 8], np.float32)
    for queries, k, error, message in (
        (np.zeros([1, 9], np.float32), 5, UserError, "9 dimensions and the index has 8"),
        (good, 0, UserError, "k must be at least 1"),
        (good[0], 5, TypeError, r"queries must be an array .*, not float32 \[8\]"),
        ([[1.0] * 8], 5, TypeError, r"floating-point numbers \[Q, D\], not a list"),
        (good * [[1], [np.nan]], 5, UserError, "^the vector of query 2 has a number that is not finite"),
        (good * [[1], [np.inf]], 5, UserError, "^the vector of query 2 has a number that is not finite"),
        (good * np.float32([[1], [3e38]]), 5, UserError, r"of query 2 has the norm .* \(at most 1e\+19"),
    ):
        with pytest.raises(error, match=message):
            index.search(queries, k)
    index.require_model("a" * 64)
    with pytest.raises(UserError, match="it was made with st:one, not with st:two; give the model it"):
        index.require_model("b" * 64, "st:two")
    index.info = dataclasses.replace(index.info, model="run", step=10)
    with pytest.raises(UserError, match=r"run was trained further since then \(step 10 to 21\)"):
        index.require_model("b" * 64, "run", 21)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": np.zeros([0, 4], np.float32), "ids": []}, "no embeddings"),
        ({"ids": ["a", "b"]}, "3 embeddings but 2 ids"),
        ({"ids": ["a", "b", "a"]}, "'a' occurs twice"),
        ({"embeddings": np.float32([[1], [1], [np.nan]])}, "^the vector of 'c' has .* not finite"),
        ({"embeddings": np.float32([[1], [3e38], [1]])}, r"^the vector of 'b' has the norm 3e\+38"),
        ({"embeddings": np.zeros([3, 4], np.float64)}, "float32"),
        ({"embeddings": [np.zeros([2, 4], np.float32), np.zeros([1, 5], np.float32)]}, "the same D"),
        ({"similarity": "euclid"}, "cosine or dot, not 'euclid'"),
    ],
)
def test_index_refuses_bad_vectors_ids_and_similarity(change, message):
    good = {"embeddings": np.ones([3, 4], np.float32), "ids": ["a", "b", "c"]}
    with pytest.raises(UserError, match=message):
        ExactIndex.build(**good | change)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_longest_allowed_vectors_have_finite_scores(similarity, storage):
    vectors = np.float32([[LONGEST * 0.99, 0], [1, 1], [0, LONGEST * 0.99]])
    for engine in (ExactIndex, ScannIndex):
        index = engine.build(vectors, ["a", "b", "c"], similarity=similarity, storage=storage)
        scores, found = index.search(vectors[[0, 2]], 3)
        assert np.isfinite(scores).all() and [names[0] for names in found] == ["a", "c"]


def test_saving_is_all_or_nothing(tmp_path, toy):
    index = ExactIndex.build(np.ones([3, 4], np.float32), ["a", "b", "c"])
    corpus = toy.write_jsonl(tmp_path / "corpus.jsonl", [{"_id": i, "text": "x"} for i in "ac"])
    with pytest.raises(UserError, match="lacks 1 of the 3 documents that were encoded, for example 'b'"):
        index.save(tmp_path / "index", corpus=corpus)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]
    index.save(tmp_path / "index")
    with pytest.raises(UserError, match="already exists"):
        index.save(tmp_path / "index")


@pytest.mark.parametrize("engine", ENGINES)
def test_flipped_bit_in_any_file_is_reported(tmp_path, toy, engine):
    place = tmp_path / "index"
    ids = [str(i) for i in range(100)]
    corpus = toy.write_jsonl(tmp_path / "corpus.jsonl", [{"_id": i, "text": f"about {i}"} for i in ids])
    engine.build(clustered(100, 8), ids).save(place, corpus=corpus)
    opened = load_index(place)  # searching must not change files
    opened.search(clustered(100, 8)[:2], 3)
    opened.close()
    names = [line.split("  ")[1] for line in (place / "SHA256SUMS").read_text().splitlines()]
    assert {"ids.json", "index.json", "documents.jsonl", "documents-offsets.npy"} < set(names)
    for name in names:
        content = bytearray((place / name).read_bytes())
        content[-2] ^= 1  # changes a digit, a bracket or a float, so that most files can still be parsed
        (place / name).write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            load_index(place)
        content[-2] ^= 1
        (place / name).write_bytes(content)
    assert len(load_index(place).ids) == 100


def test_scann_list_of_files_elsewhere_is_refused(tmp_path):
    ScannIndex.build(clustered(100, 8), [str(i) for i in range(100)]).save(tmp_path / "index")
    (tmp_path / "index" / "SHA256SUMS").unlink()
    (tmp_path / "secret.npy").write_bytes((tmp_path / "index" / "scann" / "dataset.npy").read_bytes())
    listed = tmp_path / "index" / "scann" / "scann_assets.pbtxt"
    text = listed.read_text()
    for name, message in (
        ("../../secret.npy", "lies outside of"),
        (f"{tmp_path}/secret.npy", "lies outside of"),
        ("\\056./../secret.npy", "is damaged: ScaNN did not write it"),
        ("link.npy", "is a link out of"),
    ):
        listed.write_text(text.replace("dataset.npy", name))
        (listed.parent / "link.npy").unlink(missing_ok=True)
        (listed.parent / "link.npy").symlink_to(tmp_path / "secret.npy")
        with pytest.raises(UserError, match=message):
            load_index(tmp_path / "index")
