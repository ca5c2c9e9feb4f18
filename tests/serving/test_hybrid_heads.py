"""One service of a hybrid encoder answers with all three heads, and orders by their sum."""

import numpy as np
import pytest

from jaxir import HybridEncoder
from jaxir.serving.service import Service
from tests.interop.folders import GOLDEN
from tests.serving.conftest import answered

MODEL = f"hf:{GOLDEN / 'hybrid'}"
TEXTS = ["a cat", "the dog sat on the mat", "a cat"]


@pytest.fixture(scope="module")
def service() -> Service:
    return Service.open([], model=MODEL)


@pytest.fixture(scope="module")
def encoder() -> HybridEncoder:
    return HybridEncoder.load(MODEL)


def test_encode_returns_what_each_head_makes(service, encoder):
    status, answer = answered(service, "POST", "/encode", {"texts": TEXTS, "tower": "query"})
    assert (status, answer["similarity"], answer["dimension"]) == (200, "sum", 32)
    expected = encoder.encode_queries(TEXTS)
    for number, of_text in enumerate(answer["vectors"]):
        np.testing.assert_allclose(of_text["dense"], expected.dense[number], atol=1e-6)
        np.testing.assert_allclose(of_text["tokens"], expected.tokens[number], atol=1e-6)
        assert of_text["sparse"] == pytest.approx(encoder.token_weights(expected.sparse[number])[0], abs=1e-5)


def test_endpoints_of_one_head_answer_from_the_same_model(service, encoder):
    expected = encoder.encode_passages(TEXTS)
    _, dense = answered(service, "POST", "/embed", {"inputs": TEXTS})
    np.testing.assert_allclose(dense, expected.dense, atol=1e-6)
    _, vectors = answered(service, "POST", "/v1/embeddings", {"input": TEXTS, "model": "hybrid"})
    np.testing.assert_allclose([row["embedding"] for row in vectors["data"]], expected.dense, atol=1e-6)
    _, tokens = answered(service, "POST", "/embed_all", {"inputs": TEXTS})
    for found, wanted in zip(tokens, expected.tokens, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    _, weights = answered(service, "POST", "/embed_sparse", {"inputs": TEXTS[:1]})
    found = {each["index"]: each["value"] for each in weights[0]}
    row = expected.sparse[0]
    assert found == pytest.approx(dict(zip(row.indices.tolist(), row.data.tolist(), strict=True)), abs=1e-5)


def test_rerank_orders_by_the_sum(service, encoder):
    body = {"query": "a cat", "texts": TEXTS[:2], "raw_scores": True}
    status, ranks = answered(service, "POST", "/rerank", body)
    sums = encoder.similarity(encoder.encode_queries(["a cat"]), encoder.encode_passages(TEXTS[:2]))["sum"][0]
    assert status == 200 and [rank["index"] for rank in ranks] == np.argsort(-sums).tolist()
    np.testing.assert_allclose([rank["score"] for rank in ranks], np.sort(sums)[::-1], rtol=1e-5)


def test_programs_are_counted_although_the_reranker_has_none_of_its_own(service):
    assert service.compiled_shapes()["reranked", "pair"] == 0
