"""ScaNN's int8 vectors have 4-bit residuals, which order close neighbours."""

import dataclasses

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes import residuals, scann_index
from jaxir.retrieval.indexes.base_index import load_index, normalize
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.residuals import LEVELS, find_residuals
from jaxir.retrieval.indexes.scann_index import ScannIndex

COUNT, DIMENSION = 3_000, 33  # an odd dimension leaves half a byte of each row empty


@pytest.fixture(scope="module")
def close() -> np.ndarray:
    """Vectors in 60 clusters whose members differ by little more than an int8 step."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(60, DIMENSION))
    vectors = centers[rng.integers(0, 60, COUNT)] + 0.2 * rng.normal(size=(COUNT, DIMENSION))
    vectors[:, 5] = 0
    return normalize(vectors).astype(np.float32)


@pytest.fixture(scope="module")
def ids() -> list[str]:
    return [f"d{i:04}" for i in range(COUNT)]


@pytest.fixture(scope="module", params=["tree", "all"])
def index(request, close, ids) -> ScannIndex:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scann_index, "BRUTE_FORCE_UP_TO", COUNT - 1 if request.param == "tree" else COUNT)
        return ScannIndex.build(close, ids, storage="int8")


def recall(index: ScannIndex, exact: ExactIndex, queries: np.ndarray) -> float:
    found, true = (i.search(queries, 10)[1] for i in (index, exact))
    return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, true, strict=True)])


def test_residuals_order_neighbours_that_int8_cannot_distinguish(index, close, ids):
    exact, queries = ExactIndex.build(close, ids), close[::10]
    assert recall(index, exact, queries) > 0.98
    assert recall(index.without_residuals(), exact, queries) < 0.93
    scores, found = index.search(queries, 10)
    true = [close[[int(name[1:]) for name in row]] @ q for row, q in zip(found, queries, strict=True)]
    np.testing.assert_allclose(scores, true, atol=5e-4)
    assert [index.search(query[None], 10)[1][0] for query in queries[:50]] == found[:50]


def test_saved_residuals_are_loaded_and_an_index_without_them_still_opens(tmp_path, index, close, ids):
    queries, exact = close[::10], ExactIndex.build(close, ids)
    index.save(tmp_path / "new")
    assert load_index(tmp_path / "new").search(queries, 10)[1] == index.search(queries, 10)[1]
    older = index.without_residuals()
    settings = {name: value for name, value in older.info.settings.items() if name != "residual_bits"}
    older.info = dataclasses.replace(older.info, settings=settings)
    older.save(tmp_path / "old")
    assert not list((tmp_path / "old").glob("residual*"))
    loaded = load_index(tmp_path / "old")
    assert loaded.residuals is None and recall(loaded, exact, queries) < 0.95
    loaded.delete(["d0001"])
    loaded.add(close[1:2], ["d0001"])
    assert loaded.search(queries, 10)[0].shape == (300, 10) and loaded.residuals is not None


def test_updates_keep_what_the_residuals_hold(close, ids):
    index = ScannIndex.build(close[:-1], ids[:-1], storage="int8")
    step = np.abs(close).max() / 127
    for name in ids[:3]:
        index.delete([name])
        index.add(close[-1:], [ids[-1]]) if name == ids[0] else None
        index.search(close[:1], 1)
    np.testing.assert_allclose(np.concatenate(index.vectors()), close[3:], atol=4 * step / LEVELS)


def test_equal_vectors_have_equal_scores_and_descending_ids():
    rng = np.random.default_rng(1)
    vectors = np.repeat(normalize(rng.normal(size=(40, DIMENSION))), 5, axis=0).astype(np.float32)
    ids = [f"d{i:03}" for i in range(200)]
    index = ScannIndex.build(vectors, ids, storage="int8")
    expected = ExactIndex.build(vectors, ids).search(vectors[::5], 5)[1]
    scores, found = index.search(vectors[::5], 5)
    assert found == expected and (scores == scores[:, :1]).all()


def test_decoded_vectors_are_near_and_zeros_are_exact(monkeypatch, close):
    vectors = close.copy()
    vectors[7] = 0
    multipliers = 127 / np.maximum(np.abs(vectors).max(axis=0), 1e-9)
    codes = np.rint(vectors * multipliers).astype(np.int8)
    found = find_residuals(vectors, codes, multipliers)
    assert found.codes.shape == (COUNT, 17)
    decoded = codes / multipliers + found.decoded(0, COUNT)
    assert (np.abs(decoded - vectors) <= 1.01 / LEVELS / 2 / multipliers).all()
    assert not decoded[7].any() and not decoded[:, 5].any()
    rows = np.random.default_rng(0).integers(0, COUNT, (20, 6))
    wanted = np.einsum("qkd,qd->qk", found.decoded(0, COUNT)[rows], vectors[:20])
    for at_once in (1, 7 * DIMENSION * 6, 1 << 20):
        monkeypatch.setattr(residuals, "AT_ONCE", at_once)
        np.testing.assert_allclose(found.products(vectors[:20], rows), wanted, atol=1e-6)


def test_missing_residuals_are_reported(tmp_path, close, ids):
    ScannIndex.build(close[:50], ids[:50], storage="int8").save(tmp_path / "index")
    (tmp_path / "index" / "residuals.npy").unlink()
    with pytest.raises(UserError, match=r"residuals\.npy"):
        load_index(tmp_path / "index")
