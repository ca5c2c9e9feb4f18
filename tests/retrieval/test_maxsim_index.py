"""An index of token vectors finds what MaxSim ranks first, from the command line and from Python."""

import asyncio
import contextlib
import json
import shutil

import numpy as np
import pytest

from jaxir import MultiVectorEncoder
from jaxir.core.errors import UserError
from jaxir.encode import encode
from jaxir.index import index
from jaxir.retrieval.encoding.stored_embeddings import EmbeddingsInfo, StoredEmbeddings
from jaxir.retrieval.indexes import token_codec
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.maxsim_index import MaxSimIndex
from jaxir.retrieval.searcher import Searcher
from jaxir.search import search
from jaxir.serving.limits import Limits
from jaxir.serving.service import Service
from tests.interop.folders import GOLDEN
from tests.retrieval.conftest import write_jsonl

MODEL = f"st:{GOLDEN / 'multi_vector/pylate'}"
WORDS = ["the", "cat", "sat", "on", "mat", "dog", "and", "a", "chase", "dogs"]


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """A directory with a corpus of 40 passages, one of them empty, queries, and the output of encode."""
    place = tmp_path_factory.mktemp("tokens")
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(39)] + [""]
    write_jsonl(place / "corpus.jsonl", [{"_id": f"p{i}", "text": text} for i, text in enumerate(texts)])
    queries = [" ".join(random.choice(WORDS, 3)) for _ in range(5)]
    write_jsonl(place / "queries.jsonl", [{"_id": f"q{i}", "text": text} for i, text in enumerate(queries)])
    encode(MODEL, str(place / "corpus.jsonl"), str(place / "vectors"), shard_size=16)
    return place, texts, queries


def test_search_ranks_by_the_encoder_s_own_similarity(encoded, tmp_path):
    place, texts, queries = encoded
    how = {"embeddings": str(place / "vectors"), "corpus": str(place / "corpus.jsonl")}
    index(str(tmp_path / "index"), token_storage="float16", **how)  # maxsim is the default for these vectors
    found = tmp_path / "run.trec"
    search(str(tmp_path / "index"), queries=str(place / "queries.jsonl"), output=str(found), k=10)
    encoder = MultiVectorEncoder.load(MODEL)
    scores = encoder.similarity(encoder.encode_queries(queries), encoder.encode_passages(texts))
    run = {}
    for line in found.read_text().splitlines():
        query, _, passage, _, score, _ = line.split()
        run.setdefault(query, []).append((passage, float(score)))
    for number, of_query in enumerate(scores):
        assert len(run[f"q{number}"]) == 10
        best = np.sort(of_query)[::-1][:10]
        # Token vectors are stored in float16.
        np.testing.assert_allclose([score for _, score in run[f"q{number}"]], best, atol=0.01)
        for passage, score in run[f"q{number}"]:
            assert abs(of_query[int(passage[1:])] - score) < 0.01


def test_tokens_and_queries_may_be_encoded_in_bfloat16(encoded, tmp_path):
    place, _, queries = encoded
    encode(MODEL, str(place / "corpus.jsonl"), str(tmp_path / "vectors"), dtype="bfloat16")
    assert json.loads((tmp_path / "vectors/embeddings.json").read_text())["dtype"] == "bfloat16"
    index(str(tmp_path / "index"), embeddings=str(tmp_path / "vectors"))
    exact, halved = (Searcher.open(tmp_path / "index", dtype=dtype) for dtype in ("float32", "bfloat16"))
    scores = [searcher.search(queries, 5)[0] for searcher in (exact, halved)]
    assert (scores[0] != scores[1]).any()
    np.testing.assert_allclose(*scores, rtol=0.02)
    with pytest.raises(UserError, match="a multi-vector encoder is not quantised: leave out --weights"):
        Searcher.open(tmp_path / "index", weights="int8")


def test_interrupted_encoding_of_tokens_continues(encoded, tmp_path):
    place, _, _ = encoded
    again = shutil.copytree(place / "vectors", tmp_path / "vectors")
    (again / "embeddings-00001.npy").unlink()
    info = json.loads((again / "embeddings.json").read_text())
    (again / "embeddings.json").write_text(json.dumps(info | {"complete": False}))
    encode(MODEL, str(place / "corpus.jsonl"), str(again), shard_size=16)
    for file in (place / "vectors").iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def clusters():
    """2,000 passages of 100 topics with 8 directions each, 40 queries near passages, and their MaxSim."""
    random = np.random.default_rng(1)

    def near(directions: np.ndarray) -> np.ndarray:
        x = directions + 0.15 * random.standard_normal(directions.shape)
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

    directions = near(random.standard_normal((200, 32)) * 10)
    lengths = random.integers(0, 30, 2000).astype(np.int32)
    topics = np.repeat(random.integers(0, 100, 2000), lengths)
    of_topics = random.integers(0, 200, (100, 8))
    vectors = near(directions[of_topics[topics, random.integers(0, 8, len(topics))]])
    ends = np.cumsum(lengths)
    chosen = random.choice(np.flatnonzero(lengths > 8), 40)
    queries = [near(vectors[ends[n] - 8 : ends[n]]) for n in chosen]
    passages = np.split(vectors, ends[:-1])
    scores = np.array(
        [[(q @ p.T).max(1).sum() if len(p) else -1e9 for p in passages] for q in queries], np.float32
    )
    info = EmbeddingsInfo(
        complete=True,
        count=2000,
        shard_size=1000,
        tower="passage",
        fingerprint="f",
        model=None,
        dimension=32,
        similarity="maxsim",
        dtype="float32",
        max_length=30,
        prompt="",
        text="text",
        input_name="corpus.jsonl",
        input_bytes=1,
        input_sha256="0",
    )
    ids = [f"{n:04d}" for n in range(2000)]
    half = ends[999]
    shards = [vectors[:half].astype(np.float16), vectors[half:].astype(np.float16)]
    return StoredEmbeddings(info, ids, shards, [lengths[:1000], lengths[1000:]]), queries, scores


def recall(ids: list[list[str]], scores: np.ndarray) -> float:
    best = np.argsort(-scores, axis=1)[:, :10]
    return np.mean([len(set(map(int, some)) & set(rows)) / 10 for some, rows in zip(ids, best, strict=True)])


@pytest.mark.parametrize(("storage", "least"), [("float16", 0.97), ("4bit", 0.93), ("2bit", 0.75)])
def test_few_candidates_hold_most_of_the_best_passages(clusters, tmp_path, storage, least):
    stored, queries, scores = clusters
    MaxSimIndex.build(stored, token_storage=storage, candidates=100).save(tmp_path / "index")
    found, ids = load_index(tmp_path / "index").search(queries, 10)
    assert recall(ids, scores) >= least
    for row, some in enumerate(ids):
        error = np.abs(found[row] - scores[row, [int(n) for n in some]])
        assert error.max() < {"float16": 0.005, "4bit": 0.15, "2bit": 0.6}[storage]


@pytest.mark.parametrize("storage", ["4bit"])
def test_all_passages_and_all_candidates_score_alike(clusters, storage):
    stored, queries, _ = clusters
    exact = MaxSimIndex.build(stored, token_storage=storage, candidates=0)
    some = MaxSimIndex.build(stored, token_storage=storage, candidates=1999)
    np.testing.assert_allclose(exact.search(queries, 1)[0], some.search(queries, 1)[0], atol=1e-4)
    assert exact.search(queries, 1)[1] == some.search(queries, 1)[1]


def test_products_of_codes_are_those_of_decoded_vectors():
    random = np.random.default_rng(2)
    vectors, query = random.standard_normal((500, 11)).astype(np.float32), random.standard_normal((3, 11))
    vectors[0] = 0  # a zero vector
    for bits, most in ((4, 0.2), (2, 0.55)):
        codes = token_codec.encode([vectors], bits)
        tokens = np.arange(500)
        decoded = codes.decode(tokens)
        products = codes.products(
            tokens, query.astype(np.float32), codes.centroids @ query.T.astype(np.float32)
        )
        np.testing.assert_allclose(products, decoded @ query.T, atol=1e-3)
        assert np.linalg.norm(decoded - vectors) < most * np.linalg.norm(vectors)


def test_residuals_have_the_least_error_of_normal_values():
    vectors = np.random.default_rng(3).standard_normal((400, 256)).astype(np.float32)
    centroids = np.zeros((1, 256), np.float32)
    for bits, error in ((4, 0.0095), (2, 0.1175)):  # Max 1960, table 1; equal distances give .0115 and .1188
        codes, weights = token_codec._coded(vectors, centroids, bits)
        nearest, levels = np.zeros(400, np.uint16), token_codec._levels(bits)
        decoded = token_codec.TokenCodes(centroids, nearest, codes, weights, bits, levels).decode(slice(None))
        shrunk = decoded * (decoded * vectors).sum(1, keepdims=True) / (decoded**2).sum(1, keepdims=True)
        assert np.mean((shrunk - vectors) ** 2) == pytest.approx(error, rel=0.05)


def test_index_without_stored_levels_has_equal_distances(clusters, tmp_path):
    stored, _, _ = clusters
    MaxSimIndex.build(stored, token_storage="4bit").save(tmp_path / "index")
    (tmp_path / "index/levels.npy").unlink()
    (tmp_path / "index/SHA256SUMS").unlink(missing_ok=True)
    np.testing.assert_array_equal(np.diff(load_index(tmp_path / "index")._codes.levels), np.ones(15))


def test_service_answers_from_an_index_of_token_vectors(encoded, tmp_path):
    place, _, queries = encoded
    how = {"embeddings": str(place / "vectors"), "corpus": str(place / "corpus.jsonl")}
    index(str(tmp_path / "index"), **how)
    _, ids = Searcher.open(tmp_path / "index").search(queries, 4)
    service = Service.open([str(tmp_path / "index")], limits=Limits())

    async def answers():
        async with service:
            return await service.search(queries, 4, service.systems)

    with contextlib.closing(service.opened[0].index):
        found = asyncio.run(answers())
    assert service.opened[0].kind == "multi_vector"
    assert [of_query["index"].ids for of_query in found] == ids


def test_vectors_of_tokens_and_of_texts_are_told_apart(encoded, tmp_path):
    place, _, _ = encoded
    vectors, corpus = str(place / "vectors"), str(place / "corpus.jsonl")
    with pytest.raises(UserError, match="has a vector for each token"):
        index(str(tmp_path / "index"), backend="exact", embeddings=vectors)
    with pytest.raises(UserError, match="--weights only applies to a dual encoder"):
        encode(MODEL, corpus, str(tmp_path / "other"), weights="int8")
    encode(f"hf:{GOLDEN / 'bert'}", corpus, str(tmp_path / "texts"))
    with pytest.raises(UserError, match="has one vector for each text"):
        index(str(tmp_path / "index"), backend="maxsim", embeddings=str(tmp_path / "texts"))
