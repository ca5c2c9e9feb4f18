"""Filters and the offset of /search."""

import pytest

from jaxir import ExactIndex
from jaxir.data.formats.sources import Document
from jaxir.serving.filters import matches
from jaxir.serving.limits import Limits
from jaxir.serving.service import Service
from tests.retrieval.conftest import random_texts, write_jsonl
from tests.serving.test_endpoints import ask

DOCUMENT = Document("7", "A title", "text", {"year": 2001, "tags": ["a", "b"], "draft": False})


@pytest.mark.parametrize(
    ("wanted", "is_match"),
    [
        ({"year": 2001}, True),
        ({"year": 2001.0}, True),
        ({"year": "2001"}, False),
        ({"year": [1999, 2001]}, True),
        ({"tags": "b"}, True),
        ({"tags": ["c", "a"]}, True),
        ({"tags": "c"}, False),
        ({"draft": False}, True),
        ({"draft": 0}, False),
        ({"author": None}, True),
        ({"id": "7", "title": "A title", "year": 2001}, True),
        ({"id": "7", "year": 2002}, False),
    ],
)
def test_conditions_on_stored_fields(wanted, is_match):
    assert matches(DOCUMENT, wanted) == is_match


@pytest.fixture(scope="module")
def service(world, tmp_path_factory) -> Service:
    """An index of 300 documents, of which every tenth is of the kind 0."""
    root = tmp_path_factory.mktemp("filters")
    texts = random_texts(300, seed=8)
    records = [{"_id": f"d{n}", "text": text, "metadata": {"kind": n % 10}} for n, text in enumerate(texts)]
    corpus = write_jsonl(root / "corpus.jsonl", records)
    facts = {"similarity": "cosine", "fingerprint": world.encoder.fingerprint, "model": world.model}
    vectors, ids = world.encoder.encode_passages(texts), [r["_id"] for r in records]
    ExactIndex.build(vectors, ids, **facts).save(root / "index", corpus=corpus)
    return Service.open([f"{root}/index"], limits=Limits(k=20))


def found(service: Service, **body: object) -> list[tuple[int, str]]:
    status, answer = ask(service, "/search", {"queries": ["w1 w2"], "documents": False, **body})
    assert status == 200, answer
    return [(hit["rank"], hit["id"]) for hit in answer["results"][0]["systems"][0]["hits"]]


def test_filter_keeps_the_order_and_searches_deeper(service, world):
    query = world.encoder.encode_queries(["w1 w2"])
    order = service.opened[0].index.search(query, 300)[1][0]
    of_kind = [doc_id for doc_id in order if doc_id in {f"d{n}" for n in range(0, 300, 10)}]
    assert found(service, k=20, filter={"kind": 0}) == list(enumerate(of_kind[:20], start=1))
    either = [doc_id for doc_id in order if int(doc_id[1:]) % 10 in (0, 3)][:5]
    assert [i for _, i in found(service, k=5, filter={"kind": [0, 3]})] == either
    assert found(service, filter={"kind": 11}) == []


def test_filter_depth_bounds_the_search(service, monkeypatch):
    monkeypatch.setattr(service, "limits", Limits(k=20, filter_depth=20))
    assert 0 < len(found(service, k=20, filter={"kind": [0, 1, 2, 3, 4]})) < 20


def test_offset_continues_the_list(service):
    whole = found(service, k=12)
    assert found(service, k=5, offset=7) == whole[7:]
    status, answer = ask(service, "/search", {"queries": ["w1"], "k": 10, "offset": 11})
    assert (status, answer["detail"]) == (422, "offset: k + offset may be at most 20")


def test_filter_needs_stored_documents(world):
    service = Service.open([f"{world.root}/without_texts"], limits=Limits(k=20))
    status, answer = ask(service, "/search", {"queries": ["w1"], "filter": {"kind": 0}})
    assert status == 422 and "jaxir.index --corpus" in answer["detail"]
