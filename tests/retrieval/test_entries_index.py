"""Several vectors of a document, compared with a slow reference, ties included."""

import collections

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.entries_index import EntriesIndex, document_of, entry_ids


def slowly(vectors, ids, queries, k):
    """The reference: the best entry of every document, in a loop."""
    found = []
    for query in queries:
        best = collections.defaultdict(lambda: -np.inf)
        for vector, document in zip(vectors, ids, strict=True):
            best[document] = max(best[document], float(np.einsum("d,d->", query, vector)))
        ranked = sorted(((score, document) for document, score in best.items()), reverse=True)
        found.append(ranked[:k])
    return found


@pytest.fixture(scope="module")
def entries():
    """Up to 7 entries for each of 60 documents; small whole numbers, so that many scores are equal."""
    rng = np.random.default_rng(0)
    names = [f"d{'x' * (i % 3)}{i // 3}" for i in range(60)]  # some are prefixes of others
    ids = [name for name, count in zip(names, rng.integers(1, 8, 60), strict=True) for _ in range(count)]
    vectors = rng.integers(-2, 3, (len(ids), 8)).astype(np.float32)
    queries = rng.integers(-2, 3, (11, 8)).astype(np.float32)
    return vectors, ids, queries


@pytest.mark.parametrize("backend", ["exact", pytest.param("scann", marks=pytest.mark.slow)])
@pytest.mark.parametrize("k", [1, 5, 100])
def test_the_best_entry_counts(entries, backend, k, tmp_path):
    vectors, ids, queries = entries
    index = EntriesIndex.build([vectors[:50], vectors[50:]], ids, backend=backend, similarity="dot")
    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index")
    assert isinstance(loaded, EntriesIndex)
    expected = slowly(vectors, ids, queries, k)
    # Guard: the best k entries are of fewer documents, and there are ties at the end of some list.
    if k == 5:
        ranked = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]
        assert min(len({ids[row] for row in rows}) for rows in ranked) < k
        longer = slowly(vectors, ids, queries, k + 1)
        assert any(rows[-1][0] == rows[-2][0] for rows in longer)
    for one in (index, loaded):
        scores, found = one.search(queries, k)
        assert scores.shape == (11, min(k, 60)) and one.info.count == 60
        for row, names, best in zip(scores, found, expected, strict=True):
            assert row.tolist() == [score for score, _ in best]
            if backend == "exact":  # ScaNN decides which tied entries it finds
                assert names == [document for _, document in best]


def test_document_with_all_the_best_entries_does_not_hide_others():
    ids = ["a"] * 50 + ["b", "c"]
    vectors = np.linspace(1, 0.5, 52, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
    index = EntriesIndex.build(vectors, ids, similarity="dot")
    scores, found = index.search(np.ones((1, 4), np.float32), 3)
    assert found == [["a", "b", "c"]]
    np.testing.assert_allclose(scores[0], [4, 4 * vectors[50, 0], 4 * vectors[51, 0]], rtol=1e-6)
    assert index.search(np.empty((0, 4), np.float32), 3)[1] == []


def test_ids_of_entries_rank_as_those_of_documents(entries):
    ids = [*entries[1], "a", "a!", "a#", "a-b", "ab", "é", "a\U0001f600"]
    numbered = entry_ids(ids)
    assert [document_of(entry) for entry in numbered] == ids and len(set(numbered)) == len(ids)
    assert [document_of(entry) for entry in sorted(numbered)] == sorted(ids)


def test_entries_index_refuses_mismatched_ids_and_changes_in_place(entries):
    vectors, ids, _ = entries
    with pytest.raises(UserError, match="embeddings but 1 ids"):
        EntriesIndex.build(vectors, ["a"], similarity="dot")
    with pytest.raises(UserError, match="cannot be changed in place"):
        EntriesIndex.build(vectors, ids, similarity="dot").add(vectors[:1], ["new"])
