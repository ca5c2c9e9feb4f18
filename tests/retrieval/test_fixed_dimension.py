"""MUVERA's vectors approximate MaxSim, and every engine of vectors finds candidates with them."""

import dataclasses
import json

import numpy as np
import pytest

from jaxir import MultiVectorEncoder
from jaxir.core.errors import UserError
from jaxir.encode import encode
from jaxir.index import index
from jaxir.rerank import rerank
from jaxir.retrieval.encoding import fixed_dimension
from jaxir.retrieval.encoding.fixed_dimension import FixedDimension, fixed_dimensions
from jaxir.retrieval.ranking.runs import read_run
from jaxir.retrieval.searcher import Searcher
from jaxir.search import search
from tests.beir_folder import write_folder
from tests.interop.folders import GOLDEN

MODEL = f"st:{GOLDEN / 'multi_vector/pylate'}"


def texts_of(lengths: list[int], dimension: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    vectors = np.random.default_rng(seed).normal(size=(sum(lengths), dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), np.array(lengths)


def split(vectors: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(vectors, np.cumsum(lengths)[:-1])


def one_by_one(vectors, lengths, tower, how):
    """Computes the vectors without the final projection by the definition, cluster by cluster."""
    drawn = fixed_dimension._drawn(how, vectors.shape[1])
    found = []
    for text in split(vectors, lengths):
        parts = []
        for r in range(how.repetitions):
            bits = text @ drawn.planes[:, r * how.bits : (r + 1) * how.bits] > 0
            p = how.projection
            tokens = text if drawn.projections is None else text @ drawn.projections[:, r * p : (r + 1) * p]
            for cluster in range(1 << how.bits):
                wanted = np.array([cluster >> bit & 1 for bit in range(how.bits)], bool)
                distance = (bits != wanted).sum(1)
                if tower == "query":
                    parts.append(tokens[distance == 0].sum(0) / how.repetitions)
                elif (distance == 0).any():
                    parts.append(tokens[distance == 0].mean(0))
                else:
                    parts.append(tokens[distance.argmin()] if len(text) else np.zeros(tokens.shape[1]))
        found.append(np.concatenate(parts))
    return np.array(found)


@pytest.mark.parametrize("projection", [3, 8])
@pytest.mark.parametrize("tower", ["query", "passage"])
def test_vectors_are_sums_and_means_of_clusters(tower, projection, monkeypatch):
    monkeypatch.setattr(fixed_dimension, "_BLOCK_TOKENS", 12)
    vectors, lengths = texts_of([4, 0, 9, 1, 30, 2])
    how = FixedDimension(dimension=3 * 4 * projection, repetitions=3, bits=2, projection=projection)
    found = fixed_dimensions(vectors, lengths, tower, how)
    np.testing.assert_allclose(found, one_by_one(vectors, lengths, tower, how), rtol=1e-5, atol=1e-6)
    sketched = fixed_dimensions(vectors, lengths, tower, dataclasses.replace(how, dimension=5))
    places = fixed_dimension._drawn(dataclasses.replace(how, dimension=5), 8).sketch.toarray()
    assert set(np.abs(places).sum(1)) == {1.0}
    np.testing.assert_allclose(sketched, found @ places, rtol=1e-4, atol=1e-5)


def near_texts(count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns 12 queries and `count` passages, whose tokens are near 60 common directions."""
    random = np.random.default_rng(3)
    directions = random.normal(size=(60, 24))

    def text(length: int, some: np.ndarray) -> np.ndarray:
        found = directions[random.choice(some, length)] + random.normal(size=(length, 24)) * 0.6
        return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)

    topics = [random.choice(60, 10, replace=False) for _ in range(count)]
    passages = [text(random.integers(5, 40), topic) for topic in topics]
    return [text(8, topics[n]) for n in range(12)], passages


def products_and_maxsim(count: int = 40, **how: int) -> tuple[np.ndarray, np.ndarray]:
    queries, passages = near_texts(count)
    vectors = [
        fixed_dimensions(np.concatenate(side), np.array([len(x) for x in side]), tower, FixedDimension(**how))
        for side, tower in ((queries, "query"), (passages, "passage"))
    ]
    maxsim = [[(q @ p.T).max(1).sum() for p in passages] for q in queries]
    return vectors[0] @ vectors[1].T, np.array(maxsim)


def test_products_approach_maxsim_from_below_as_clusters_grow():
    """Theorem 2.1 of the paper: without projections a product is at most MaxSim."""
    gaps = []
    for bits in (1, 3, 5, 8):
        how = {"repetitions": 10, "bits": bits, "projection": 24}
        found, maxsim = products_and_maxsim(dimension=10 * 2**bits * 24, **how)
        assert (found <= maxsim + 1e-4).all()
        gaps.append((maxsim - found).mean() / maxsim.mean())
    assert sorted(gaps, reverse=True) == gaps and gaps[-1] < 0.7 * gaps[0]


def test_projections_keep_products_in_expectation_and_their_noise_falls():
    noise = []
    for repetitions in (4, 64):
        how = {"repetitions": repetitions, "bits": 4}
        exact, maxsim = products_and_maxsim(projection=24, dimension=repetitions * 16 * 24, **how)
        # The partitions are the same: only projections differ.
        found, _ = products_and_maxsim(projection=8, dimension=repetitions * 64, **how)
        noise.append(np.abs(found - exact).mean())
        assert abs((found - exact).mean()) < 0.05 * maxsim.mean()
    assert noise[1] < 0.4 * noise[0]  # 1 / 4 is expected: noise falls with the root of 64 / 4


def test_candidates_have_the_passages_that_maxsim_ranks_first():
    found, maxsim = products_and_maxsim(1000, dimension=2560, repetitions=20)
    best = np.argsort(-maxsim, axis=1)[:, :10]
    candidates = np.argsort(-found, axis=1)[:, :200]
    assert np.mean([np.isin(b, c).mean() for b, c in zip(best, candidates, strict=True)]) > 0.95


def test_more_dimensions_than_there_are_components_are_refused():
    with pytest.raises(ValueError, match="give at most 320, or more repetitions or bits"):
        fixed_dimensions(*texts_of([3]), "query", FixedDimension(dimension=321, repetitions=10, bits=2))
    assert FixedDimension.of(2560, 128) == FixedDimension(dimension=2560, repetitions=20)
    assert FixedDimension.of(100, 8, bits=2).repetitions == 4  # 4 clusters of 8 components each


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BEIR folder, and the vectors of its passages."""
    place = write_folder(tmp_path_factory.mktemp("fde") / "pairs", train=60, held_out=12)
    how = {"fde": 600, "fde_repetitions": 40, "fde_bits": 2, "shard_size": 32}
    encode(MODEL, str(place / "corpus.jsonl"), str(place / "vectors"), **how)
    return place


@pytest.mark.parametrize("backend", ["exact", pytest.param("scann", marks=pytest.mark.slow)])
def test_engines_find_candidates_that_rerank_by_maxsim(folder, backend, tmp_path):
    place = str(tmp_path / "index")
    index(place, backend=backend, embeddings=str(folder / "vectors"), model=MODEL)
    about = json.loads((tmp_path / "index/index.json").read_text())
    assert about["dimension"] == 600 and about["similarity"] == "dot"
    assert about["fde"] == {"dimension": 600, "repetitions": 40, "bits": 2, "projection": 16, "seed": 0}
    queries = str(folder / "queries.jsonl")
    search(place, queries=queries, output=str(tmp_path / "run.trec"), k=30)
    rerank(
        model=MODEL,
        run=str(tmp_path / "run.trec"),
        dataset=f"beir:{folder}",
        depth=30,
        output=str(tmp_path / "late.trec"),
    )
    encoder = MultiVectorEncoder.load(MODEL)
    texts = {
        name: {r["_id"]: r["text"] for r in map(json.loads, (folder / name).read_text().splitlines())}
        for name in ("queries.jsonl", "corpus.jsonl")
    }
    found, scored = read_run(tmp_path / "run.trec"), read_run(tmp_path / "late.trec")
    products = Searcher.open(place).token_encoder.encode_queries(list(texts["queries.jsonl"].values()))
    products = (
        products @ np.concatenate([np.load(x) for x in sorted((folder / "vectors").glob("*-0*.npy"))]).T
    )
    sides = [list(texts[name].values()) for name in ("queries.jsonl", "corpus.jsonl")]
    scores = encoder.similarity(encoder.encode_queries(sides[0]), encoder.encode_passages(sides[1]))
    names = list(texts["corpus.jsonl"])
    for number, query_id in enumerate(texts["queries.jsonl"]):
        some = list(scored[query_id])
        assert set(some) == set(found[query_id]) and len(some) == 30
        expected = scores[number, [names.index(doc_id) for doc_id in some]]
        np.testing.assert_allclose(list(scored[query_id].values()), expected, rtol=1e-4)
        assert max(found[query_id].values()) == pytest.approx(products[number].max(), rel=1e-3)


def test_the_settings_are_those_of_the_passages(folder, tmp_path):
    vectors, corpus = str(folder / "vectors"), str(folder / "corpus.jsonl")
    index(str(tmp_path / "index"), backend="exact", embeddings=vectors)
    searcher = Searcher.open(tmp_path / "index")
    assert searcher.token_encoder.how == FixedDimension(dimension=600, repetitions=40, bits=2)
    encoder = MultiVectorEncoder.load(MODEL)
    tokens = encoder.encode_queries("a cat")
    expected = fixed_dimensions(tokens, np.array([len(tokens)]), "query", searcher.token_encoder.how)
    np.testing.assert_array_equal(searcher.token_encoder.encode_queries(["a cat"]), expected)
    with pytest.raises(UserError, match="was started with another --fde"):
        encode(MODEL, corpus, vectors, fde=500, fde_repetitions=40, fde_bits=2, shard_size=32)
    encode(MODEL, corpus, str(tmp_path / "others"), fde=500)
    with pytest.raises(UserError, match="encode the new documents with the same --fde flags"):
        index(update=str(tmp_path / "index"), embeddings=str(tmp_path / "others"))


def test_flags_without_effect_are_refused(folder, tmp_path):
    given = (str(folder / "corpus.jsonl"), str(tmp_path / "out"))
    with pytest.raises(UserError, match="--fde only applies to a multi-vector encoder"):
        encode(f"hf:{GOLDEN / 'bert'}", *given, fde=64)
    with pytest.raises(UserError, match="--fde_bits only applies with --fde"):
        encode(MODEL, *given, fde_bits=3)
    with pytest.raises(UserError, match=r"--fde: 900 dimensions are too many: 10 repetitions of"):
        encode(MODEL, *given, fde=900, fde_repetitions=10)
