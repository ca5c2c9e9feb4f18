"""A service of a multi-vector or sparse encoder answers with vectors of tokens, or with weights."""

import numpy as np
import pytest

from jaxir import MultiVectorEncoder, SparseEncoder
from jaxir.core.errors import UserError
from jaxir.encode import encode
from jaxir.index import index
from jaxir.serving.limits import Limits
from jaxir.serving.service import Service
from tests.interop.folders import GOLDEN
from tests.retrieval.conftest import write_jsonl
from tests.serving.conftest import answered

MULTI = f"st:{GOLDEN / 'multi_vector/pylate'}"
TEXTS = ["a cat", "the dog sat on the mat", "a cat", "cat " * 40]


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory) -> str:
    encoder = SparseEncoder.load(f"hf:{GOLDEN / 'mlm_bert'}", query_max_length=24, passage_max_length=24)
    encoder.save(place := tmp_path_factory.mktemp("sparse") / "model")
    return str(place)


@pytest.fixture(scope="module")
def tokens() -> Service:
    return Service.open([], model=MULTI)


def assert_near(found, expected) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("tower", ["query", "passage"])
def test_encode_returns_a_vector_for_each_token(tokens, tower):
    status, answer = answered(tokens, "POST", "/encode", {"texts": TEXTS, "tower": tower})
    assert (status, answer["similarity"], answer["dimension"]) == (200, "maxsim", 8)
    encoder = MultiVectorEncoder.load(MULTI)
    assert answer["fingerprint"] == encoder.fingerprint
    assert_near(answer["vectors"], encoder.encode(TEXTS, tower=tower))
    assert answer["cut_at"][:3] == [None] * 3 and 0 < answer["cut_at"][3] < len(TEXTS[3])


def test_other_servers_endpoints_return_vectors_of_tokens(tokens):
    encoder = MultiVectorEncoder.load(MULTI)
    status, answer = answered(tokens, "POST", "/embed_all", {"inputs": TEXTS})
    assert status == 200
    assert_near(answer, encoder.encode_passages(TEXTS))
    status, answer = answered(tokens, "POST", "/embed_all", {"inputs": "a cat", "prompt_name": "query"})
    assert_near(answer, encoder.encode_queries(["a cat"]))
    status, answer = answered(tokens, "POST", "/pooling", {"input": TEXTS[:2], "model": "any"})
    assert (status, answer["object"], answer["model"]) == (200, "list", "pylate")
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert {each["object"] for each in answer["data"]} == {"pooling"}
    assert_near([each["data"] for each in answer["data"]], encoder.encode_passages(TEXTS[:2]))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, encoder.tokens(TEXTS[:2], "passage")))


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/embed_all", {"inputs": TEXTS, "truncate": False}, 422, "inputs.3 has more than 16 tokens"),
        ("/embed_all", {"inputs": ["a", ""]}, 422, "inputs.1 is empty"),
        ("/embed_all", {"inputs": "a", "prompt_name": "topic"}, 422, "there is no prompt 'topic'"),
        ("/embed_sparse", {"inputs": "a"}, 404, "no sparse encoder is served"),
        ("/v1/embeddings", {"input": "a"}, 404, "the model makes no single vector of a text"),
    ],
)
def test_requests_that_fit_no_model_get_a_sentence(tokens, path, body, status, sentence):
    got, answer = answered(tokens, "POST", path, body)
    assert got == status and sentence in str(answer)


def test_sparse_encoders_return_weights(sparse_model):
    service, encoder = Service.open([], model=sparse_model), SparseEncoder.load(sparse_model)
    expected = encoder.encode_passages(TEXTS)
    status, answer = answered(service, "POST", "/encode", {"texts": TEXTS, "tower": "passage"})
    assert (status, answer["similarity"], answer["dimension"]) == (200, "dot", encoder.dimension)
    for found, wanted in zip(answer["vectors"], encoder.token_weights(expected), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    status, answer = answered(service, "POST", "/embed_sparse", {"inputs": TEXTS})
    found = np.zeros(expected.shape, np.float32)
    for row, weights in enumerate(answer):
        for each in weights:
            found[row, each["index"]] = each["value"]
    np.testing.assert_allclose(found, expected.toarray(), atol=1e-5)
    with pytest.raises(UserError, match="a sparse encoder is not quantised: leave out --weights"):
        Service.open([], model=sparse_model, weights="int8")


@pytest.mark.slow
def test_models_of_indexes_encode_too(tmp_path):
    records = [{"_id": f"p{i}", "text": text} for i, text in enumerate(TEXTS)]
    corpus = str(write_jsonl(tmp_path / "corpus.jsonl", records))
    encode(MULTI, corpus, str(tmp_path / "tokens"))
    encode(MULTI, corpus, str(tmp_path / "vectors"), fde=64, fde_bits=2)
    index(str(tmp_path / "maxsim"), embeddings=str(tmp_path / "tokens"))
    index(str(tmp_path / "fde"), backend="exact", embeddings=str(tmp_path / "vectors"))
    service = Service.open([f"{tmp_path}/maxsim", f"{tmp_path}/fde"], limits=Limits(k=4))
    _, answer = answered(service, "POST", "/encode", {"texts": ["a cat"]})
    assert answer["index"] == "maxsim"
    assert_near(answer["vectors"], MultiVectorEncoder.load(MULTI).encode_queries(["a cat"]))
    _, answer = answered(service, "POST", "/encode", {"texts": ["a cat"], "index": "fde"})
    assert np.shape(answer["vectors"]) == (1, 64) and answer["similarity"] == "dot"
    status, answer = answered(service, "POST", "/search", {"queries": ["a cat"], "k": 2})
    assert status == 200
    assert {hit["id"] for system in answer["results"][0]["systems"] for hit in system["hits"]} == {"p0", "p2"}
