"""ScaNN tuned for a recall, in smaller types, and changed after it was built."""

import numpy as np
import pytest
import tensorflow as tf

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.retrieval.indexes import scann_index, tuning
from jaxir.retrieval.indexes.base_index import load_index, normalize
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.rows import main_directions
from jaxir.retrieval.indexes.saved_search import SavedSearch
from jaxir.retrieval.indexes.scann_files import stored_vectors
from jaxir.retrieval.indexes.scann_index import ENERGY, NEARLY_ALL, ScannIndex
from jaxir.retrieval.indexes.tuning import NEAR, Trial, tune

COUNT, DIMENSION = 6_000, 32


@pytest.fixture(scope="module", autouse=True)
def trees_of_few_vectors():
    """Builds trees of fewer vectors than a tree needs by default; test_index.py builds one by default."""
    assert COUNT < scann_index.BRUTE_FORCE_UP_TO
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scann_index, "BRUTE_FORCE_UP_TO", COUNT - 1_000)
        yield


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(COUNT // 50, DIMENSION))
    points = centers[rng.integers(0, len(centers), COUNT)] + 0.8 * rng.normal(size=(COUNT, DIMENSION))
    return normalize(points).astype(np.float32)


@pytest.fixture(scope="module")
def ids() -> list[str]:
    return [f"d{i}" for i in range(COUNT)]


@pytest.fixture(scope="module")
def trial(vectors, ids) -> Trial:
    return Trial(vectors, ids, similarity="cosine")


@pytest.fixture(scope="module")
def index(vectors, ids) -> ScannIndex:
    return ScannIndex.build(vectors, ids)


def test_tuning_reaches_the_target_and_lower_targets_search_less(index, trial):
    found = {target: tune(index, trial, target=target) for target in (0.7, 0.97)}
    for target, (tuned, recall) in found.items():
        assert recall.value == pytest.approx(trial.recall(tuned, np.arange(1, 1000, 2)))
        assert recall.value > target - 0.05, "the half that was not tuned on"
        assert trial.recall(tuned, trial.tuning()) >= target, "the half that was tuned on"
        leaves = tuned.info.settings["leaves_to_search"]
        # Recall need not rise with every leaf, so only one number just below must miss the target.
        fewer = range(max(1, leaves - max(1, int(NEAR * leaves))), leaves)
        tried = [tuned.with_settings(leaves_to_search=number) for number in fewer]
        assert not tried or min(trial.recall(index, trial.tuning()) for index in tried) < target
        assert recall.queries == 500 and recall.of_passages
    low, high = (found[target][0].info.settings for target in (0.7, 0.97))
    assert low["leaves_to_search"] < high["leaves_to_search"] < index.info.settings["leaves"]
    assert found[0.7][1].value < found[0.97][1].value < 1
    assert "recall@10 0." in str(found[0.97][1]) and "500 passages used as queries" in str(found[0.97][1])
    with pytest.raises(UserError, match="between 0 and 1"):
        tune(index, trial, target=95)


@pytest.mark.parametrize(("near", "most"), [(1, 1), (1, 480), (30, 480), (480, 480), (7, 31)])
def test_search_for_the_fewest_leaves_needs_few_trials(near, most):
    for true in range(1, most + 1, 1 + most // 40):
        tried: list[int] = []
        found = tuning._fewest(lambda n, true=true, to=tried: to.append(n) or n >= true, near=near, most=most)
        assert true <= found <= true + NEAR * found and len(tried) <= 26
        assert all(1 <= n <= most for n in tried)
    assert tuning._fewest(lambda n: False, near=near, most=most) is None


class OnlyTheNearest:
    def __init__(self, index):
        self.index = index

    def search(self, queries, k):
        return self.index.search(queries, 1)


def test_passages_as_queries_are_not_their_own_answers(trial, vectors, ids):
    nearest = OnlyTheNearest(ExactIndex.build(vectors, ids))
    assert trial.recall(nearest, trial.tuning()[:20]) == 0


def test_more_answers_get_more_candidates_and_leaves(index):
    narrow = index.with_settings(leaves_to_search=2, reorder=15)
    assert narrow.candidates(10) == {"pre_reorder_num_neighbors": 15, "leaves_to_search": 2}
    assert narrow.candidates(11)["pre_reorder_num_neighbors"] == 19
    found = narrow.candidates(100)
    assert found["pre_reorder_num_neighbors"] == 4 * 90 + 15
    assert found["leaves_to_search"] == -(-40 * 90 * index.info.settings["leaves"] // COUNT)
    everything = narrow.candidates(COUNT)
    assert everything["leaves_to_search"] == index.info.settings["leaves"]
    assert everything["pre_reorder_num_neighbors"] >= COUNT


@pytest.mark.parametrize(("storage", "least", "share"), [("bfloat16", 0.97, 0.55), ("int8", 0.9, 0.3)])
def test_smaller_storage_costs_measured_recall(tmp_path, vectors, ids, index, trial, storage, least, share):
    small = ScannIndex.build(vectors, ids, storage=storage)
    everything = {"leaves_to_search": index.info.settings["leaves"], "reorder": 1600}
    recalls = [trial.measure(i.with_settings(**everything)).value for i in (index, small)]
    assert least < recalls[1] < recalls[0]
    small.save(tmp_path / "index")
    (stored,) = (tmp_path / "index" / "scann").glob(f"{storage}_dataset.npy")
    assert stored.stat().st_size < share * vectors.nbytes
    loaded = load_index(tmp_path / "index")
    assert loaded.info.settings["storage"] == storage
    assert loaded.search(vectors[:5], 3)[1] == small.search(vectors[:5], 3)[1]


def test_add_refuses_known_ids_and_other_dimensions(index, vectors):
    for new, name, message in (
        (vectors[:1], "d9", "'d9' is already in the index"),
        (vectors[:1, :16].copy(), "n9", "16 dimensions and the index has 32"),
    ):
        with pytest.raises(UserError, match=message):
            index.add(new, [name])


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_added_int8_vectors_are_not_clipped(similarity):
    """ScaNN scales int8 vectors by the greatest number of each dimension when it is built."""
    rng = np.random.default_rng(2)
    old, new, queries = (rng.normal(size=(n, DIMENSION)).astype(np.float32) for n in (600, 200, 100))
    old[:, : DIMENSION // 2] /= 10
    new[:, DIMENSION // 2 :] /= 10
    ids = [f"d{i}" for i in range(800)]
    grown = ScannIndex.build(old, ids[:600], similarity=similarity, storage="int8")
    grown.add(new, ids[600:])
    exact = ExactIndex.build(np.concatenate([old, new]), ids, similarity=similarity)
    near, found = (index.search(queries, 10) for index in (exact, grown))
    assert np.mean([len(set(a) & set(b)) for a, b in zip(near[1], found[1], strict=True)]) > 9.5
    np.testing.assert_allclose(found[0], near[0], atol=0.02 * np.abs(near[0]).max())


@pytest.mark.slow
@pytest.mark.parametrize(("count", "storage"), [(COUNT, "float32"), (2100, "int8")])
def test_long_vectors_cost_the_others_no_recall(tmp_path, vectors, ids, count, storage):
    """If ScaNN coded the long vectors, recall@10 would be .36 (tree, float32) and .36 (int8)."""
    dotted, rng = 3 * vectors[:count], np.random.default_rng(3)
    queries = vectors[:count:15] + 0.02 * rng.normal(size=(count // 15, DIMENSION)).astype(np.float32)
    dotted[7] *= 1000
    dotted[8] = dotted[7]  # d7 and d8 have equal scores
    index = ScannIndex.build(dotted[:-1], ids[: count - 1], similarity="dot", storage=storage)
    assert index.outliers.rows.tolist() == [7, 8] and index.info.settings["outliers"] == 2
    index.delete(["d3", "d8"])
    longest = 4000 * vectors[count - 1 : count]
    index.add(longest, ["d8"])
    dotted[8] = longest[0]
    kept = [i for i in range(count - 1) if i != 3]
    exact = ExactIndex.build(dotted[kept], [ids[i] for i in kept], similarity="dot")
    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index")
    for k in (10, 100):
        scores, true = exact.search(queries, k)
        for found in (index, loaded):
            values, answers = found.search(queries, k)
            assert np.mean([len(set(a) & set(b)) / k for a, b in zip(answers, true, strict=True)]) > 0.97
            assert (np.diff(values) <= 0).all() and values.shape == scores.shape
            for name in ("d7", "d8"):  # outliers are compared exactly
                assert [name in a for a in answers] == [name in a for a in true]
        alone = [loaded.search(query[None], k)[1][0] for query in queries[:5]]
        assert alone == loaded.search(queries[:5], k)[1]
    with stored_vectors(tmp_path / "index", storage, loaded.outliers) as stored:
        rows = [int(name[1:]) for name in loaded.ids]
        np.testing.assert_allclose(stored, dotted[rows], atol=1e-6 if storage == "float32" else 0.05)
    ids_in_graph, _ = SavedSearch(tmp_path / "index", k=10, fingerprint="", name="m")(tf.constant(queries))
    in_graph = [[name.decode() for name in row] for row in ids_in_graph.numpy()]
    true = exact.search(queries, 10)[1]
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(in_graph, true, strict=True)]) > 0.95


def test_long_vectors_do_not_hide_negative_scores():
    """ScaNN holds a long vector as zeros, which score more than negative scores."""
    vectors = np.ones((40, 4), np.float32) + np.arange(40, dtype=np.float32)[:, None] / 100
    vectors[[3, 5]] *= 50
    ids = [f"d{i:02}" for i in range(40)]
    index = ScannIndex.build(vectors, ids, similarity="dot", storage="int8")
    away, toward = index.search(np.float32([[-1] * 4, [1] * 4]), 2)[1]
    assert away == ["d00", "d01"] and toward == ["d05", "d03"]
    assert [len(set(found)) for found in index.search(-vectors[:2], 40)[1]] == [40, 40]


def test_int8_refuses_lengths_that_one_scale_cannot_hold(vectors, ids):
    spread = vectors * np.exp(np.random.default_rng(0).normal(size=(COUNT, 1))).astype(np.float32)
    with pytest.raises(UserError, match=r"besides the 120 largest.* times as large.*--storage=bfloat16, or"):
        ScannIndex.build(spread, ids, similarity="dot", storage="int8")
    index = ScannIndex.build(vectors[:50], ids[:50], similarity="dot", storage="int8")
    with pytest.raises(UserError, match="differ too much in size"):
        index.add(np.concatenate([vectors[50:75] * 30]), ids[50:75])
    assert index.ids == ids[:50] and index.search(vectors[:1], 1)[1] == [["d0"]]


def test_fewer_vectors_than_leaves_are_searched_by_brute_force(tmp_path, index, vectors, ids):
    left = 1
    assert left < index.info.settings["leaves"]
    few = index.with_settings(leaves_to_search=1)
    few.delete(ids[left:])
    expected = ExactIndex.build(vectors[:left], ids[:left]).search(vectors[:20], 10)
    for found in (few, load_index(_saved(few, tmp_path))):
        scores, answers = found.search(vectors[:20], 10)
        assert answers == expected[1] and not found.tuned
        np.testing.assert_allclose(scores, expected[0], atol=1e-5)


def test_changed_tree_holds_each_vector_under_its_id(tmp_path, vectors, ids):
    old = COUNT - 500
    index = ScannIndex.build(vectors[:old], ids[:old], storage="bfloat16")
    new = vectors[old:].copy()
    index.add(new, ids[old:])
    new[:] = 0  # the index must have copied it
    gone = ids[::70]  # old and new ones
    index.delete(gone)
    kept = [i for i in ids if i not in set(gone)]
    assert index.ids == kept
    queries = vectors[:1000:3]
    scores, found = index.search(queries, 10)
    by_id = dict(zip(ids, vectors, strict=True))
    true = [[by_id[i] @ query for i in row] for row, query in zip(found, queries, strict=True)]
    np.testing.assert_allclose(scores, true, atol=5e-3)
    exact = ExactIndex.build(np.stack([by_id[i] for i in kept]), kept).search(queries, 10)[1]
    assert np.mean([len(set(a) & set(b)) for a, b in zip(found, exact, strict=True)]) > 9.5
    again = load_index(_saved(index, tmp_path))
    assert again.ids == kept and again.search(queries, 10)[1] == found


@pytest.mark.parametrize("backend", ["scann", "exact"])
def test_command_prints_the_recall(tmp_path, toy, small_model, encoder, backend, capsys):
    texts, questions = toy.random_texts(300, seed=9, max_words=10), toy.random_texts(20, seed=8, max_words=10)
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", texts)
    queries = toy.write_queries(tmp_path / "queries.jsonl", questions)
    toy.encode(small_model, corpus, tmp_path / "emb")
    flags = [f"--backend={backend}", f"--embeddings={tmp_path}/emb", f"--output={tmp_path}/index"]
    flags += [f"--queries={queries}", "--target_recall=0.9", "--storage=int8"]
    assert cli.main("jaxir.index:index", flags) == 0
    index, held_out = load_index(tmp_path / "index"), encoder.encode_queries(questions)[1::2]
    assert index.info.settings["storage"] == "int8"
    assert backend == "scann" or index.info.settings["target_recall"] == 0.9
    _, near = toy.nearest(encoder.encode_passages(texts), index.ids, held_out, 10)
    hits = [len({*a} & {*b}) for a, b in zip(near, index.search(held_out, 10)[1], strict=True)]
    line = f"recall@10 {np.mean(hits) / 10:.4f} against exact search on 10 held-out queries"
    assert line in capsys.readouterr().out


def test_index_with_a_pickle_is_refused(tmp_path, vectors, ids):
    directory = _saved(ScannIndex.build(vectors[:50], ids[:50]), tmp_path)
    assert not list(directory.rglob("*.pkl"))
    (directory / "scann" / "scann_docids.pkl").write_bytes(b"cos\nsystem\n(S'touch x'\ntR.")
    with pytest.raises(UserError, match=r"scann/scann_docids\.pkl was added after the directory was written"):
        load_index(directory)
    (directory / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="contains a pickle"):
        load_index(directory)


@pytest.fixture
def flat_vectors(vectors) -> np.ndarray:
    """Vectors [3000, 64], mostly in about 30 directions, none of them an axis."""
    wide = np.concatenate([vectors[:3000], 0.02 * vectors[3000:6000]], axis=1)
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(64, 64)))
    return normalize(wide @ turn).astype(np.float32)


def test_codes_are_of_the_main_directions(tmp_path, monkeypatch, flat_vectors, ids):
    monkeypatch.setattr(scann_index, "BRUTE_FORCE_UP_TO", 2000)
    some = ids[: len(flat_vectors)]
    index = ScannIndex.build(flat_vectors, some, storage="int8")
    directions = index.info.settings["directions"]
    assert directions == 32, "half of all, although fewer hold 0.9 of the variance"
    assert main_directions([flat_vectors], "cosine", energy=ENERGY) < 32
    directory = _saved(index, tmp_path)
    assert np.load(directory / "scann" / "hashed_dataset.npy").shape[1] == directions // 2
    assert np.load(directory / "scann" / "int8_dataset.npy").shape == flat_vectors.shape
    wide = {"leaves_to_search": index.info.settings["leaves"], "reorder": 400}
    near = ExactIndex.build(flat_vectors, some).search(flat_vectors[:100], 10)
    for found in (index, load_index(directory)):
        scores, answers = found.with_settings(**wide).search(flat_vectors[:100], 10)
        np.testing.assert_allclose(scores, near[0], atol=0.02)  # scores use all dimensions
        assert np.mean([len({*a} & {*b}) for a, b in zip(answers, near[1], strict=True)]) > 8.5
    index.delete(some[:2])
    assert index.search(flat_vectors[2:3], 1)[1] == [["d2"]]
    assert load_index(_saved(index, tmp_path)).info.settings["directions"] == directions
    assert "directions" not in index.without_soar().info.settings


def test_main_directions_ignore_the_mean_and_are_nearly_all_of_spread_vectors(vectors):
    assert main_directions([vectors], "cosine", energy=ENERGY) > NEARLY_ALL * DIMENSION
    rng = np.random.default_rng(0)
    scales = np.array([4, 3, 2, 1, 1, 1, 1, 1])
    vectors = (scales * rng.normal(size=(5000, 8)) + 50).astype(np.float32)
    shares = np.cumsum(scales**2) / (scales**2).sum()  # .47, .74, .85, .88, .91, ...
    for energy in (0.4, 0.6, 0.8, 0.9):
        expected = 1 + int((shares < energy).sum())
        assert main_directions([vectors], "dot", energy=energy) == expected
    assert main_directions([vectors], "cosine", energy=0.9) > 1
    assert main_directions(np.array_split(vectors, 3), "dot", energy=0.6) == 2, "however sharded"


def test_shards_on_disk_are_not_copied_into_memory(tmp_path, vectors, ids):
    shards = []
    for i, part in enumerate(np.array_split(3 * vectors, 4)):
        np.save(tmp_path / f"{i}.npy", part)
        shards.append(np.load(tmp_path / f"{i}.npy", mmap_mode="r"))
    whole, parts = ScannIndex.build(vectors, ids), ScannIndex.build(shards, ids)
    settings = {"leaves_to_search": whole.info.settings["leaves"], "reorder": 1600}
    found = [i.with_settings(**settings).search(vectors[:50], 5) for i in (whole, parts)]
    assert found[0][1] == found[1][1]
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{i}.npy" for i in range(4)]


def _saved(index, tmp_path):
    directory = tmp_path / f"index{len(list(tmp_path.iterdir()))}"
    index.save(directory)
    return directory
