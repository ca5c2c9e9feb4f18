"""Exact search on several devices, in smaller types, and its selection of the best."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import cli
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from jaxir.retrieval.indexes import exact, rounding, topk
from jaxir.retrieval.indexes.base_index import load_index, normalize
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.exact_rows import STEP
from jaxir.retrieval.indexes.topk import NO_RANK, block_program, merge_program
from jaxir.retrieval.indexes.tuning import Trial
from jaxir.runtime.cpu import has_quick_bfloat16
from jaxir.runtime.partitioning import MeshConfig

COUNT, DIMENSION = 3000, 24


def with_ties(count: int, dimension: int, seed: int) -> np.ndarray:
    """Returns small integers: their products are exact in every type and order, and many scores tie."""
    return np.random.default_rng(seed).integers(-2, 3, (count, dimension)).astype(np.float32)


def names(count: int) -> list[str]:
    return [f"d{i}" for i in np.random.default_rng(2).permutation(count)]


@pytest.fixture(scope="module")
def points() -> np.ndarray:
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(COUNT // 50, DIMENSION))
    points = centers[rng.integers(0, len(centers), COUNT)] + 0.4 * rng.normal(size=(COUNT, DIMENSION))
    return (points * rng.uniform(0.5, 2, (COUNT, 1))).astype(np.float32)


@pytest.mark.parametrize(
    ("storage", "block"),
    [("float32", 16_384), ("float32", 64), pytest.param("bfloat16", 16_384, marks=pytest.mark.slow)],
)
def test_ties_are_broken_by_id_across_devices_and_blocks(storage, block, toy, monkeypatch):
    """3,000 rows fill the four devices unevenly; 41 ids share each score, on all devices."""
    monkeypatch.setattr(exact, "BLOCK", block)
    monkeypatch.setattr(exact, "QUERY_BLOCK", min(block, 4))
    vectors, queries = with_ties(COUNT, 6, 0), with_ties(9, 6, 1)
    ids = names(COUNT)
    index = ExactIndex.build(np.array_split(vectors, 3), ids, similarity="dot", storage=storage)
    index = index.on(MeshConfig().build())
    for k in (1, 7, 300, COUNT + 1):
        expected_scores, expected = toy.nearest(vectors, ids, queries, k, similarity="dot")
        scores, found = index.search(queries, k)
        np.testing.assert_array_equal(scores, expected_scores)
        assert found == expected
        assert len(set(expected_scores[0])) < k or k == 1  # guard: there are ties


@pytest.mark.parametrize(
    ("storage", "sizes"),
    [("float32", {"slices": 2, "tensor": 2}), pytest.param("int8", {}, marks=pytest.mark.slow)],
)
def test_many_devices_answer_as_one(points, toy, storage, sizes):
    ids, queries = names(COUNT), points[:40] + 0.1
    points = np.concatenate([np.zeros_like(points[:1]), points[1:]])
    index = ExactIndex.build(points, ids, storage=storage)
    one = index.on(MeshConfig().build(jax.devices()[:1])).search(queries, 20)
    scores, found = index.on(MeshConfig(**sizes).build()).search(queries, 20)
    assert found == one[1]
    np.testing.assert_allclose(scores, one[0], atol=1e-6)
    if storage == "float32":
        expected_scores, expected = toy.nearest(points, ids, queries, 20)
        assert one[1] == expected
        np.testing.assert_allclose(one[0], expected_scores, atol=1e-6)
        assert one[1] != toy.nearest(points, ids, queries, 20, similarity="dot")[1]  # guard: lengths matter


@pytest.fixture
def comparisons(monkeypatch) -> list[tuple[int, int, bool]]:
    """Records (queries, answers, whether in bfloat16) of each comparison."""
    if not has_quick_bfloat16():
        pytest.skip("a CPU that multiplies bfloat16 numbers is needed")
    seen, compare = [], ExactIndex._best

    def best(index, queries, k, *, columns=False):
        seen.append((len(queries), k, columns))
        return compare(index, queries, k, columns=columns)

    monkeypatch.setattr(ExactIndex, "_best", best)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_rounded_products_lose_no_answer(points, toy, comparisons, similarity):
    """Many queries are compared in bfloat16, which cannot rank 60 copies of a vector."""
    rng = np.random.default_rng(5)
    vectors = np.concatenate([points, np.repeat(points[:1], 60, axis=0)])
    near = points[:1] + 0.05 * rng.normal(size=(20, DIMENSION))
    queries = np.concatenate([points[100:400] + 0.1, near]).astype(np.float32)
    ids = names(len(vectors))
    index = ExactIndex.build(np.array_split(vectors, 3), ids, similarity=similarity)
    scores, found = index.search(queries, 10)
    (every, more, rounded), (unknown, again, float32) = comparisons
    assert (every, more, rounded, again, float32) == (320, rounding.with_more(10), True, 10, False)
    assert 20 <= unknown < 80, "bfloat16 decides some queries and not others"
    rough = index._best(queries, 10, columns=True)[1]
    assert [[ids[index._rows_by_rank[r]] for r in row] for row in rough] != found, "rounding does reorder"
    expected_scores, expected = toy.nearest(vectors, ids, queries, 10, similarity=similarity)
    assert found == expected
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-6, atol=1e-6)


def test_equal_scores_are_ordered_by_id_despite_rounding(comparisons):
    """257 + 1 equals 129 + 129, but bfloat16 rounds 257 to 256, and so would separate the two scores."""
    vectors = np.float32([[257, 1], [129, 129], *([-i, 0] for i in range(40))])
    ids = ["y", "x", *(f"d{i}" for i in range(40))]
    index = ExactIndex.build(vectors, ids, similarity="dot")
    scores, found = index.search(np.ones((rounding.LEAST_QUERIES, 2), np.float32), 2)
    assert np.all(scores == 258) and found == [["y", "x"]] * len(scores)
    # All of so few vectors would be compared again in float32, so bfloat16 is not used.
    few = ExactIndex.build(vectors[:12], ids[:12], similarity="dot")
    assert few.search(np.ones((rounding.LEAST_QUERIES, 2), np.float32), 2)[1] == found
    assert [rounded for *_, rounded in comparisons] == [True, False]


def test_smaller_types_answer_many_queries_as_few(points, comparisons):
    ids = names(COUNT)
    index = ExactIndex.build(points, ids, storage="int8")
    scores, found = index.search(points[:300] + 0.1, 10)
    few_scores, few = index.search(points[:30] + 0.1, 10)
    assert found[:30] == few
    np.testing.assert_allclose(scores[:30], few_scores, atol=1e-6)
    assert [rounded for *_, rounded in comparisons] == [True, False]


def test_rounding_error_of_scores_is_bounded(points):
    queries, vectors = points[:200] + 0.1, points[200:]
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (queries, vectors)]
    moved = np.abs(queries.astype(np.float64) @ vectors.T - rounded[0] @ rounded[1].T).max(axis=1)
    mesh = MeshConfig().build(jax.devices()[:1]).mesh
    lengths = rounding.lengths_program(mesh)(vectors, np.ones(len(vectors), np.float32))[0]
    assert lengths[0] == pytest.approx(np.linalg.norm(vectors, axis=1).max())
    bound = rounding.greatest_errors(queries, *np.asarray(lengths))
    assert np.all(moved < bound) and np.all(bound < 20 * moved)
    # Rounding does not change these vectors, so that only sums have errors.
    summed = np.abs(rounded[0] @ rounded[1].T - rounded[0].astype(np.float64) @ rounded[1].T).max(axis=1)
    lengths = rounding.lengths_program(mesh)(rounded[1], np.ones(len(vectors), np.float32))[0]
    assert lengths[1] == 0 and np.all(summed < rounding.greatest_errors(rounded[0], *np.asarray(lengths)))


def test_vectors_stay_on_devices_that_have_room(points, monkeypatch):
    """A CPU has no memory of its own, so the test sets its size."""
    ids = names(COUNT)
    index = ExactIndex.build(points, ids)
    expected = index.search(points[:9], 5)[1]
    reads = []
    read = index._rows.read
    monkeypatch.setattr(index._rows, "read", lambda *where: reads.append(where) or read(*where))
    for memory, kept in ((4 * COUNT * DIMENSION // 4, False), (4 * COUNT * DIMENSION, True)):
        monkeypatch.setattr(exact, "_memory", lambda devices, memory=memory: memory)
        assert index.search(points[:9], 5)[1] == index.search(points[:9], 5)[1] == expected
        assert len(reads) == (4 if kept else 8), "four devices, read at each search unless they keep"
        reads.clear()
    index.delete([expected[0][0]])
    index.add(-points[:1], ["new"])
    assert index.search(points[:9], 5)[1][0][:4] == expected[0][1:]
    assert index.search(-points[:9], 5)[1][0][0] == "new"


def test_devices_exchange_only_answers():
    """Devices compare without communication, then exchange [n, Q, K], for a corpus of any size."""
    mesh = MeshConfig().build().mesh
    shape = jax.ShapeDtypeStruct
    answers = shape((4, 16, 5), np.float32), shape((4, 16, 5), np.int32)
    block = shape((4096, 8), np.float32), shape((4096,), np.float32), shape((4096,), np.int32)
    compare = block_program(mesh, None, 9999).lower(shape((16, 8), np.float32), *block, *answers)
    travelling = r"= \(?(\S+) (all-\w+|collective-\w+|reduce-scatter)\S*\("
    assert not re.findall(travelling, compare.compile().as_text())
    found = re.findall(travelling, merge_program(mesh).lower(*answers).compile().as_text())
    assert found and all(kind.startswith("all-gather") for _, kind in found)
    assert {re.sub(r"\{.*", "", size) for size, _ in found} <= {"f32[4,16,5]", "s32[4,16,5]"}


def test_padding_rows_are_never_answers():
    """Five rows on four devices are padded with zeros, which score higher than the rows."""
    vectors = -np.arange(1, 11, dtype=np.float32).reshape(5, 2)
    index = ExactIndex.build(vectors, list("abcde"), similarity="dot").on(MeshConfig().build())
    scores, found = index.search(np.ones((1, 2), np.float32), 5)
    assert found == [list("abcde")] and scores.tolist() == [[-3, -7, -11, -15, -19]]


@pytest.mark.parametrize("k", [3, 12, 100])
@pytest.mark.parametrize("kind", ["ties", "rising", "random"])
def test_groups_are_opened_as_needed(k, kind):
    """The best are in few groups, in many, or tie, so different numbers of groups are opened."""
    rng, (count, size, blocks) = np.random.default_rng(3), (8, 2048, 5)
    assert size // topk.GROUP // 4 >= topk.FEW_GROUPS  # guard: there are groups to choose from
    products = rng.normal(size=(count, size * blocks)).astype(np.float32)
    if kind == "ties":
        products = np.round(products * 2)
    if kind == "rising":
        products += np.linspace(0, 9, size * blocks, dtype=np.float32)
    multipliers = np.ones(size * blocks, np.float32)
    if kind == "random":
        multipliers = rng.uniform(0.5, 2, size * blocks).astype(np.float32)
    ranks = rng.permutation(size * blocks).astype(np.int32)
    ranks[-100:] = NO_RANK
    best = jnp.full((count, k), -jnp.inf, jnp.float32), jnp.full((count, k), NO_RANK, jnp.int32)
    take = jax.jit(topk._take)
    for at in range(0, size * blocks, size):
        part = slice(at, at + size)
        best = take(products[:, part], multipliers[part], ranks[part], *best)
    scores = np.where(ranks == NO_RANK, -np.inf, products * multipliers)
    order = np.lexsort((np.broadcast_to(ranks, scores.shape), -scores))[:, :k]
    np.testing.assert_array_equal(best[0], np.take_along_axis(scores, order, axis=1))
    np.testing.assert_array_equal(np.sort(best[1], axis=1), np.sort(ranks[order], axis=1))


def test_one_more_tied_group_than_there_is_room_for():
    """The first four of five groups are opened, and the answers are in the last ones."""
    size = 32 * topk.GROUP
    scores = (np.arange(size) <= topk.FEW_GROUPS).astype(np.float32)[None]
    ranks = np.arange(size, dtype=np.int32)[::-1]
    none = np.full((1, 3), -np.inf, np.float32), np.full((1, 3), NO_RANK, np.int32)
    found = jax.jit(topk._take)(scores, np.ones(size, np.float32), ranks, *none)
    assert found[0].tolist() == [[1, 1, 1]]
    assert sorted(found[1][0].tolist()) == ranks[topk.FEW_GROUPS - 2 : topk.FEW_GROUPS + 1][::-1].tolist()


def test_ranks_in_the_millions_break_ties():
    """Ranks are compared as floats of the same bits; converting them would make several of these equal."""
    ranks = [[2_000_000_001, 70_000_001, 5, 70_000_000, 2_000_000_000, 8_388_609, 8_388_608]]
    ranks = np.array(ranks, np.int32)
    found = jax.jit(topk.best, static_argnums=2)(np.zeros((1, 7), np.float32), ranks, 5)[1]
    assert sorted(found[0].tolist()) == [5, 8_388_608, 8_388_609, 70_000_000, 70_000_001]


@pytest.mark.parametrize(
    ("storage", "similarity", "least", "share"),
    [("bfloat16", "cosine", 0.95, 0.5), ("int8", "dot", 0.8, 0.25)],
)
@pytest.mark.slow
def test_smaller_storage_costs_measured_recall(tmp_path, points, storage, similarity, least, share):
    ids = names(COUNT)
    trial = Trial(points, ids, similarity=similarity)
    index = ExactIndex.build(points, ids, similarity=similarity, storage=storage)
    assert least < trial.measure(index).value < 1
    index.save(tmp_path / "index")
    files = {p.name: p.stat().st_size for p in (tmp_path / "index").glob("*.npy")}
    assert files["embeddings.npy"] < share * points.nbytes + 200
    assert ("scales.npy" in files) == (storage == "int8" and similarity == "dot")
    loaded = load_index(tmp_path / "index")
    assert loaded.info.settings == {"storage": storage}
    scores, found = loaded.search(points[:50], 5)
    assert found == index.search(points[:50], 5)[1]
    queries = normalize(points[:50]) if similarity == "cosine" else points[:50]
    vectors = normalize(points) if similarity == "cosine" else points
    near = [[queries[q] @ vectors[ids.index(d)] for d in row] for q, row in enumerate(found)]
    np.testing.assert_allclose(scores, near, rtol=0.03, atol=0.03)
    loaded.add(100 * points[1:2], ["new"])
    loaded.delete([found[1][0]])
    loaded.save(tmp_path / "changed")
    assert load_index(tmp_path / "changed").search(points[1:2], 4)[1] == [["new", *found[1][1:4]]]


def test_saved_int8_vectors_keep_their_scales_in_every_block(tmp_path):
    """Each vector has another length, and so another scale."""
    count = STEP + 100
    vectors = np.random.default_rng(3).standard_normal((count, 8)).astype(np.float32)
    vectors *= np.linspace(1, 9, count, dtype=np.float32)[:, None]
    ids = [f"d{i}" for i in range(count)]
    index = ExactIndex.build(vectors, ids, similarity="dot", storage="int8")
    index.save(tmp_path / "index")
    for queries in (vectors[-20:], -vectors[:20]):
        scores, found = load_index(tmp_path / "index").search(queries, 5)
        assert found == index.search(queries, 5)[1]
        near = [[queries[q] @ vectors[int(d[1:])] for d in row] for q, row in enumerate(found)]
        np.testing.assert_allclose(scores, near, rtol=0.05)


def test_index_without_storage_or_checksums_still_opens(tmp_path, points):
    index = ExactIndex.build(points, names(COUNT))
    index.save(tmp_path / "index")
    path = tmp_path / "index" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": {}}))
    (tmp_path / "index" / "SHA256SUMS").unlink()
    assert load_index(tmp_path / "index").search(points[:9], 5)[1] == index.search(points[:9], 5)[1]


def test_target_recall_is_stored_and_applies_to_tpus_only(tmp_path, points, monkeypatch):
    """A CPU is always exact, also with the operation that approximates on TPUs."""
    ids = names(COUNT)
    index = ExactIndex.build(points, ids, target_recall=0.9)
    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index")
    assert loaded.info.settings["target_recall"] == 0.9
    expected = ExactIndex.build(points, ids).search(points[:9], 5)[1]
    assert loaded.search(points[:9], 5)[1] == expected
    monkeypatch.setattr(topk, "APPROXIMATE_ON", ("cpu",))
    block_program.cache_clear()
    assert loaded.search(points[:9], 5)[1] == expected
    mesh, shape = MeshConfig().build().mesh, jax.ShapeDtypeStruct
    answers = shape((4, 8, 5), np.float32), shape((4, 8, 5), np.int32)
    block = shape((64, 8), np.float32), shape((64,), np.float32), shape((64,), np.int32)
    program = block_program(mesh, 0.9, COUNT).trace(shape((8, 8), np.float32), *block, *answers)
    text = program.lower(lowering_platforms=("tpu",)).as_text()
    assert "ApproxTopK" in text and "recall_target = 0.899" in text
    block_program.cache_clear()


def test_recall_is_not_measured_with_a_model_that_was_trained_further(tmp_path, toy, capsys):
    """The model has the name of the one that encoded the passages, but gives other vectors of that size."""
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(20, seed=9))
    queries = toy.write_queries(tmp_path / "q.jsonl", toy.random_texts(4, seed=8, max_words=10))
    model, after = toy.save_model(tmp_path / "model", seed=0), toy.save_model(tmp_path / "after", seed=1)
    toy.encode(model, corpus, tmp_path / "emb")
    shutil.rmtree(model)
    shutil.move(after, model)
    flags = ["--backend=exact", f"--embeddings={tmp_path}/emb", f"--output={tmp_path}/index"]
    assert cli.main("jaxir.index:index", [*flags, "--storage=int8", f"--queries={queries}"]) == 1
    assert f"{model} has changed since then; encode the corpus again" in capsys.readouterr().err
    assert not (tmp_path / "index").exists()


def test_single_passage_of_a_part_is_stored_in_a_smaller_type(tmp_path, toy, small_model, capsys):
    """The recall of a single passage cannot be measured."""
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(3))
    toy.encode(small_model, corpus, tmp_path / "emb")
    flags = ["--backend=exact", "--storage=int8", "--parts=2", f"--embeddings={tmp_path}/emb"]
    assert cli.main("jaxir.index:index", [*flags, f"--output={tmp_path}/index"]) == 0
    assert capsys.readouterr().out.count("recall") == 1, "measured for the part with two passages"
    index, vectors = load_index(tmp_path / "index"), open_embeddings(tmp_path / "emb")
    scores, found = index.search(vectors.shards[0], 1)
    assert [row[0] for row in found] == vectors.ids
    np.testing.assert_allclose(scores[:, 0], 1, atol=0.01)
