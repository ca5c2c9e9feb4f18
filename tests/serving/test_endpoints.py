"""The endpoints of OpenAI, TEI, Cohere and Jina, of a model and a reranker without an index."""

import base64
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxir import CrossEncoder, DualEncoder
from jaxir.serving.app import build_app
from jaxir.serving.embedder import IN_TURN, Embedder, Unfit, chosen
from jaxir.serving.engines import DenseEngine
from jaxir.serving.guard import Guard
from jaxir.serving.limits import Limits
from jaxir.serving.metrics import Metrics
from jaxir.serving.problems import ABSENT
from jaxir.serving.service import Service
from tests.retrieval.conftest import random_texts
from tests.serving.conftest import result_of

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CROSS = f"hf:{GOLDEN}/cross_bert"
TEXTS = ["w1 w2 w3", "w5", "joined arrays", "w7 w8 w9 " * 30]


@pytest.fixture(scope="module")
def service(world) -> Service:
    return Service.open([], model=world.model, reranker=CROSS, limits=Limits(inputs=100))


def ask(service: Service, path: str, body: object = None, **headers: str) -> tuple[int, object]:
    """Returns status and answer of a POST with a body, or of a GET."""
    keys = [headers.pop("key")] if "key" in headers else []
    app, sent = Guard(build_app(service, Metrics(service)), limits=service.limits, keys=keys), []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    async def request(_):
        pairs = {"content-type": "application/json"} | headers
        scope = {"type": "http", "path": path, "query_string": b"", "client": ("10.0.0.1", 1)}
        scope |= {"method": "GET" if body is None else "POST"}
        await app(scope | {"headers": [(k.encode(), v.encode()) for k, v in pairs.items()]}, receive, send)

    result_of(service, request)
    return sent[0]["status"], json.loads(b"".join(part["body"] for part in sent[1:]))


def test_openai_embeddings_equal_the_models_passages(service, world):
    status, answer = ask(service, "/v1/embeddings", {"input": TEXTS, "model": "text-embedding-3-small"})
    expected = world.encoder.encode_passages(TEXTS)
    assert status == 200 and answer["object"] == "list" and answer["model"] == Path(world.model).name
    assert [(each["object"], each["index"]) for each in answer["data"]] == [
        ("embedding", n) for n in range(4)
    ]
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected, atol=2e-6)
    tokens = sum(map(len, world.encoder.tokens(TEXTS, "passage")))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    body = {"input": TEXTS[0], "encoding_format": "base64", "dimensions": 5}
    encoded = base64.b64decode(ask(service, "/embeddings", body)[1]["data"][0]["embedding"])
    short = expected[0, :5] / np.linalg.norm(expected[0, :5])
    np.testing.assert_allclose(np.frombuffer(encoded, "<f4"), short, atol=2e-6)


def test_token_ids_are_those_of_the_models_tokenizer(service, world):
    name = Path(world.model).name
    ids = [row.tolist() for row in world.encoder.tokens(TEXTS[:2], "passage")]
    expected = world.encoder.encode_passages(TEXTS[:2])
    for given, wanted in ((ids, expected), (ids[0], expected[:1])):
        status, answer = ask(service, "/v1/embeddings", {"input": given, "model": name})
        assert status == 200, answer
        np.testing.assert_allclose([each["embedding"] for each in answer["data"]], wanted, atol=2e-6)
    for wrong in ({"input": ids, "model": "text-embedding-ada-002"}, {"input": [10**6]}, {"input": [-1]}):
        status, answer = ask(service, "/v1/embeddings", wrong)
        assert status == 400 and "check_embedding_ctx_length=False" in answer["error"]["message"]
        assert answer["error"]["param"] == "input.0"


@pytest.mark.parametrize(
    "body",
    [
        {"input_type": "query"},
        {"input_type": "search_query"},
        {"prompt_name": "query"},
        {"model": "MODEL:query"},
    ],
)
def test_side_of_a_text_chooses_the_tower(service, world, body):
    body = {key: value.replace("MODEL", Path(world.model).name) for key, value in body.items()}
    _, answer = ask(service, "/v1/embeddings", {"input": TEXTS[0], **body})
    queries, passages = world.encoder.encode_queries(TEXTS[:1]), world.encoder.encode_passages(TEXTS[:1])
    np.testing.assert_allclose(answer["data"][0]["embedding"], queries[0], atol=2e-6)
    assert np.abs(queries - passages).max() > 0.1


@pytest.mark.parametrize(
    ("body", "status", "field", "sentence"),
    [
        ({}, 400, "input", "input: Field required"),
        ({"input": []}, 400, "input", "input: it has 0 inputs; give 1 to 100"),
        ({"input": ["a"] * 101}, 400, "input", "input: it has 101 inputs; give 1 to 100"),
        ({"input": ["a", ""]}, 400, "input.1", "input.1 is empty; leave it out"),
        ({"input": ["a", 1]}, 400, "input", "input: give a string or a list of strings, or"),
        ({"input": ["\ud800"]}, 400, "input", "input: input 0 is not valid Unicode"),
        ({"input": "a" * 100_001}, 400, "input", "input: input 0 is longer than 100,000"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "dimensions is 0, but vectors of"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "encoding_format: Input"),
        ({"input": "a", "prompt_name": "quary"}, 400, "prompt_name", "model has no prompt 'quary'; give"),
        ({"input": "a", "input_type": "query", "prompt_name": "b"}, 400, "input_type", "give prompt_name"),
        ({"input": "a", "dimension": 3}, 400, None, "unknown key 'dimension'; did you mean 'dimensions'?"),
        ({"input": "w1 " * 99, "truncate": False}, 400, "input.0", "input.0 has more than"),
    ],
)  # fmt: skip
def test_openai_errors_have_its_form(service, body, status, field, sentence):
    got, answer = ask(service, "/v1/embeddings", body)
    error = answer["error"]
    assert (got, error["type"], error["param"]) == (status, "invalid_request_error", field)
    assert error["message"].startswith(sentence)


def test_unknown_fields_of_other_servers_are_ignored(service):
    assert ask(service, "/v1/embeddings", {"input": "a", "user": "u", "priority": 1, "task": "x"})[0] == 200


def test_models_are_listed(service, world):
    status, answer = ask(service, "/v1/models")
    assert status == 200 and [m["id"] for m in answer["data"]] == [Path(world.model).name, "cross_bert"]
    model, reranker = answer["data"]
    assert (model["kind"], model["dimension"], reranker["kind"]) == ("embedding", 32, "reranker")
    assert model["prompts"] == ["query", "passage"]
    status, alone = ask(service, f"/v1/models/{model['id']}")  # `ask` starts an application each time
    assert status == 200 and alone | {"created": 0} == model | {"created": 0}
    status, answer = ask(service, "/v1/models/gpt")
    assert status == 404 and answer["error"]["message"].startswith("there is no model 'gpt'; give one of")


def test_tei_embeds_normalised_and_raw(service, world):
    expected = world.encoder.encode_passages(TEXTS)
    status, vectors = ask(service, "/embed", {"inputs": TEXTS})
    assert status == 200
    np.testing.assert_allclose(vectors, expected, atol=2e-6)
    for path in ("/embed", "/"):
        raw = np.array(ask(service, path, {"inputs": TEXTS[0], "normalize": False})[1])
        length = np.linalg.norm(raw)
        assert raw.shape == (1, 32) and abs(length - 1) > 0.01
        np.testing.assert_allclose(raw[0] / length, expected[0], atol=2e-6)
    status, answer = ask(service, "/embed", {"inputs": "a", "prompt_nam": "query"})
    assert (status, answer["error_type"]) == (422, "validation")
    assert "did you mean 'prompt_name'?" in answer["error"]
    assert ask(service, "/", {"input": "a"})[0] == 422
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    np.testing.assert_allclose(
        ask(service, "/similarity", {"inputs": inputs})[1], expected[1:] @ expected[0], atol=2e-6
    )


def test_info_and_health(service, world):
    status, info = ask(service, "/info")
    assert (status, info["model_id"], info["auto_truncate"]) == (200, Path(world.model).name, True)
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == world.encoder.text_settings("passage")[1]
    assert ask(service, "/health") == (200, {"status": "ok"})


def test_rerankers_scores_are_sigmoids_of_logits(service):
    query, documents = "w1 w2", ["w3", "w1 w2 w3", "w9 " * 9]
    logits = CrossEncoder.load(CROSS).score([(query, text) for text in documents])
    order = [int(n) for n in np.argsort(-logits)]
    body = {"query": query, "texts": documents, "raw_scores": True, "return_text": True}
    status, ranks = ask(service, "/rerank", body)
    assert status == 200 and [(r["index"], r["text"]) for r in ranks] == [(n, documents[n]) for n in order]
    np.testing.assert_allclose([r["score"] for r in ranks], logits[order], atol=1e-5)
    body = {"query": query, "documents": [documents[0], {"text": documents[1]}, documents[2]], "top_n": 2}
    for path in ("/v1/rerank", "/v2/rerank"):
        status, answer = ask(service, path, body | {"return_documents": True})
        assert [r["index"] for r in answer["results"]] == order[:2]
        assert [r["document"]["text"] for r in answer["results"]] == [documents[n] for n in order[:2]]
        probabilities = 1 / (1 + np.exp(-logits[order[:2]]))
        np.testing.assert_allclose(
            [r["relevance_score"] for r in answer["results"]], probabilities, atol=1e-5
        )
        assert answer["usage"]["total_tokens"] > 10
    assert "document" not in ask(service, "/v1/rerank", body)[1]["results"][0]
    status, answer = ask(service, "/v1/rerank", {"query": query, "documents": []})
    assert status == 400 and answer["message"] == answer["detail"]


def test_absent_paths_say_what_replaces_them(service):
    for path, instead in ABSENT.items():
        status, answer = ask(service, path, {"input": "a"})
        sentence = json.dumps(answer, ensure_ascii=False)
        assert status == 404 and instead in sentence and path in sentence, path
    absent = {"detail": "there is no path /nothing; GET /docs lists the paths"}
    assert ask(service, "/nothing") == (404, absent)
    assert ask(service, "/embed") == (
        405,
        {"error": "/embed does not take GET; send POST", "error_type": "validation"},
    )


def test_rerank_of_other_servers_says_which_path_takes_documents(service):
    """Clients of vLLM and Infinity post documents to /rerank."""
    status, answer = ask(service, "/rerank", {"query": "a", "documents": ["b"]})
    assert (status, answer["error"]) == (422, "/rerank takes texts; POST /v1/rerank takes documents")


def test_what_is_not_served_says_how_to_start_it(world):
    only_model = Service.open([], model=world.model)
    status, answer = ask(only_model, "/rerank", {"query": "a", "texts": ["b"]})
    assert status == 404 and "start jaxir.serve with --reranker=MODEL" in answer["error"]
    assert (
        "--reranker=MODEL" in ask(only_model, "/v1/rerank", {"query": "a", "documents": ["b"]})[1]["message"]
    )
    assert "--index=DIR" in ask(only_model, "/search", {"queries": ["a"]})[1]["detail"]
    assert ask(only_model, "/encode", {"texts": ["w1"]})[1]["index"] is None
    only_reranker = Service.open([], reranker=CROSS)
    status, answer = ask(only_reranker, "/v1/embeddings", {"input": "a"})
    assert status == 404 and "--model=MODEL" in answer["error"]["message"]
    assert ask(only_reranker, "/info")[1]["model_type"].keys() == {"reranker"}


def test_long_lists_wait_in_parts(service, world):
    texts = random_texts(IN_TURN + 30, seed=3)
    vectors = ask(service, "/embed", {"inputs": texts})[1]
    np.testing.assert_allclose(vectors, world.encoder.encode_passages(texts), atol=2e-6)


def test_named_prompts_and_pooling_without_them(world):
    """Pooling leaves out exactly the tokens of the prompt that a text has."""
    loaded = DualEncoder.load(world.model)
    prompts = {"query": "w1 w2 ", "code": "w5 w6 w7 "}
    settings = dataclasses.replace(loaded.settings, named_prompts=prompts, pools_prompts=False)
    encoder = DualEncoder(loaded.model, loaded.tokenizer, settings, "f", spec=world.model)
    embedder = Embedder("model", DenseEngine(encoder, {}, k=1))
    assert embedder.reading(None) == ("passage", "")
    assert embedder.reading("code") == ("passage", "w5 w6 w7 ")
    assert embedder.reading("search_query") == ("query", encoder.settings.query_prompt)
    with pytest.raises(
        Unfit, match=r"model has no prompt 'cod'; give one of query, code, passage; did you mean"
    ):
        embedder.reading("cod")
    default = dataclasses.replace(settings, default_prompt_name="code")
    other = Embedder("model", DenseEngine(DualEncoder(loaded.model, loaded.tokenizer, default, "f"), {}, k=1))
    assert other.reading(None) == ("passage", "w5 w6 w7 ")
    # The prompt's three tokens and the special token before them.
    counts = {"query_prompt_tokens": 4, "passage_prompt_tokens": 4}
    model = loaded.model.with_config(dataclasses.replace(loaded.model.config, **counts))
    expected = DualEncoder(model, loaded.tokenizer, loaded.settings, "f").encode_passages(["w5 w6 w7 w8 w9"])
    question = embedder.question("w8 w9", embedder.reading("code"))
    (answer,) = embedder.engine.answer(embedder.engine.read([question]))
    np.testing.assert_allclose(answer.vector, expected[0], atol=2e-6)


def test_one_of_several_models_is_chosen_by_name(world):
    engine = DenseEngine(world.encoder, {}, k=1)
    one, two = Embedder("owner/one", engine), Embedder("two", engine)
    assert chosen([one, two], None) == (one, None)
    assert chosen([one, two], "one:query") == (one, "query") and chosen([one, two], "two") == (two, None)
    assert chosen([one], "text-embedding-3-small") == (one, None)
    with pytest.raises(Unfit, match="there is no model 'three'; give one of owner/one, two"):
        chosen([one, two], "three")


def test_api_key_guards_all_but_the_probe_and_pages(service):
    body = {"input": "w1"}
    status, answer = ask(service, "/v1/embeddings", body, key="secret")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert ask(service, "/v1/embeddings", body, key="secret", authorization="Bearer secret")[0] == 200
    for wrong in ("Bearer secre", "Bearer secret2", "Basic secret", "secret", ""):
        assert ask(service, "/v1/embeddings", body, key="secret", authorization=wrong)[0] == 401
    for path in ("/v1/models", "/info", "/healthz", "/metrics", "/openapi.json"):
        assert ask(service, path, key="secret")[0] == 401
    assert ask(service, "/", {"inputs": "w1"}, key="secret")[0] == 401
    assert ask(service, "/health", key="secret")[0] == 200
