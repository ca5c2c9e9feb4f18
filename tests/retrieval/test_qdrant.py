"""Qdrant: the client's local mode, and its requests to a stand-in server, which the local mode answers."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.qdrant_index import QdrantCollection, QdrantIndex
from jaxir.retrieval.ranking.runs import read_run
from tests.retrieval.postgres_cluster import free_port

COUNT, DIMENSION = 200, 16  # the local mode takes 20 ms for each vector that it stores


def command(name: str, *flags: str) -> int:
    return cli.main(f"jaxir.{name}:{name}", flags)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(COUNT, DIMENSION)).astype(np.float32)


@pytest.fixture(scope="module")
def ids() -> list[str]:
    return [f"d{i} 'x\" é\n{{}}" for i in range(COUNT)]


@contextlib.contextmanager
def stand_in(address: str = "127.0.0.1") -> Iterator[tuple[str, set[str | None]]]:
    """Yields the URI of a server with the API's requests that jaxir sends, and the keys that it receives."""
    store, keys = QdrantClient(":memory:", force_disable_check_same_thread=True), set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            keys.add(self.headers.get("api-key"))
            text = self.rfile.read(int(self.headers.get("content-length", 0)))
            _, name, *rest = self.path.partition("?")[0].strip("/").split("/")
            try:
                result = respond(self.command, name, "/".join(rest), json.loads(text or "{}"))
                status, body = 200, {"status": "ok", "time": 0.0, "result": result}
            except ValueError as error:
                status, body = 404, {"status": {"error": str(error)}, "time": 0.0}
            body = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_) -> None:
            pass

    def respond(method: str, name: str, path: str, body: dict):
        done = {"operation_id": 0, "status": "completed"}
        match method, path:
            case "GET", "exists":
                return {"exists": store.collection_exists(name)}
            case "GET", "":
                return json.loads(store.get_collection(name).model_dump_json())
            case "PUT", "":
                made = models.CreateCollection.model_validate(body)
                how = {"vectors_config": made.vectors, "metadata": made.metadata}
                return store.create_collection(name, **how)
            case "DELETE", "":
                return store.delete_collection(name)
            case "PUT", "points":
                store.upsert(name, models.Batch.model_validate(body["batch"]))
                return done
            case "POST", "points/delete":
                store.delete(name, models.PointIdsList.model_validate(body))
                return done
            case "POST", "points/scroll":
                where = {key: body[key] for key in ("offset", "limit")}
                points, after = store.scroll(name, **where, with_payload=False)
                points = [json.loads(point.model_dump_json()) for point in points]
                return {"points": points, "next_page_offset": after}
            case "POST", "points/count":
                return {"count": store.count(name, exact=body["exact"]).count}
            case "POST", "points/query/batch":
                assert all(request["params"]["exact"] for request in body["searches"])
                found = [models.QueryRequest.model_validate(request) for request in body["searches"]]
                answers = store.query_batch_points(name, found)
                return [json.loads(answer.model_dump_json()) for answer in answers]
        raise ValueError(f"{method} {name} {path} is unknown")

    server = ThreadingHTTPServer((address, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://{address}:{server.server_port}", keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        store.close()


@pytest.fixture(params=["local", "server"])
def uri(request, tmp_path, monkeypatch) -> Iterator[str]:
    with stand_in() as (server, _):
        place = server if request.param == "server" else str(tmp_path / "qdrant")
        monkeypatch.setenv("QDRANT_URI", place)
        yield place


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_results_equal_exact_search(tmp_path, toy, uri, vectors, ids, similarity):
    expected, found = toy.nearest(vectors, ids, vectors[:30], 20, similarity=similarity)
    shards = [vectors[:70], vectors[70:]]
    QdrantIndex.build(shards, ids, uri=uri, similarity=similarity).save(tmp_path / "index")
    index = load_index(tmp_path / "index")
    scores, answers = index.search(vectors[:30], 20)
    assert answers == found
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    assert [len(row) for row in index.search(vectors[:1], COUNT + 5)[1]] == [COUNT]
    index.close()
    with pytest.raises(UserError, match="already has a collection passages: give another --collection"):
        QdrantIndex.build(vectors, ids, uri=uri)


def test_update_completes_after_an_interruption(tmp_path, toy, uri, vectors, ids):
    QdrantIndex.build(vectors[:60], ids[:60], uri=uri).save(tmp_path / "index")
    other = QdrantCollection(uri, "passages")
    other.insert([vectors[60:63]], 60, cosine=True)
    other.close()
    index = load_index(tmp_path / "index")
    with pytest.raises(UserError, match="has 63 vectors and the index 60: run an interrupted update again"):
        index.search(vectors[:1], 3)
    index.delete(ids[1:2])
    index.add(vectors[70:75], ids[70:75])
    kept = [i for i in range(60) if i != 1] + list(range(70, 75))
    _, found = toy.nearest(vectors[kept], [ids[i] for i in kept], vectors[:9], 64)
    assert index.search(vectors[:9], 64)[1] == found
    index.close()


def test_collection_of_another_index_is_refused(tmp_path, uri, vectors, ids):
    QdrantIndex.build(vectors[:9], ids[:9], uri=uri).save(tmp_path / "old")
    collection = QdrantCollection(uri, "passages")
    collection.drop()
    with pytest.raises(UserError, match="has no collection passages: build the index again"):
        load_index(tmp_path / "old")
    QdrantIndex.build(vectors[9:18], ids[:9], uri=uri).save(tmp_path / "new")
    with pytest.raises(UserError, match=r"passages in .* was made by another index"):
        load_index(tmp_path / "old")
    collection.drop()
    collection.create([np.ones([3, 7], np.float32)], "FLAT", cosine=True, mark=None)
    collection.close()
    with pytest.raises(UserError, match="its vectors have 7 dimensions, not 16; build the index again"):
        load_index(tmp_path / "new")


def test_files_of_the_local_mode_are_only_opened_by_name(tmp_path, vectors, ids, monkeypatch):
    """The files are pickles, which may run code, so the user must name them in QDRANT_URI."""
    with pytest.raises(UserError, match="--backend=qdrant needs --uri=https://HOST:6333, or the path"):
        QdrantIndex.build(vectors, ids)
    index = QdrantIndex.build(vectors[:9], ids[:9], uri=tmp_path / "qdrant")
    index.save(tmp_path / "index")
    index.close()
    opened = []
    monkeypatch.setattr("qdrant_client.local.persistence.pickle.loads", opened.append)
    with pytest.raises(UserError, match=r"only opens if you name it: set QDRANT_URI=/.*/qdrant"):
        load_index(tmp_path / "index")
    assert not opened


def test_unreachable_or_misnamed_server_is_refused_in_a_sentence(vectors, ids, monkeypatch):
    for place, message in (
        (f"http://127.0.0.1:{free_port()}", "cannot be reached: .*refused"),
        ("http://me:secret@127.0.0.1", "must not contain a password: set QDRANT_API_KEY"),
        ("ftp://127.0.0.1", "must be http://HOST:6333, https://HOST:6333 or a path, not ftp"),
    ):
        started = time.monotonic()
        with pytest.raises(UserError, match=message) as raised:
            QdrantIndex.build(vectors, ids, uri=place)
        assert time.monotonic() - started < 10
        assert "\n" not in str(raised.value) and "secret" not in str(raised.value)
    monkeypatch.setenv("QDRANT_URI", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="where QDRANT_API_KEY is sent, but --uri is"):
        QdrantIndex.build(vectors, ids, uri="http://127.0.0.1:2")


def test_key_crosses_a_network_only_if_the_user_allows(vectors, ids, monkeypatch):
    monkeypatch.setenv("QDRANT_API_KEY", "Very5ecret")
    with stand_in("0.0.0.0") as (place, keys):  # leads to this machine, but is no loopback address
        with pytest.raises(UserError, match=f"QDRANT_API_KEY would go to {place} in clear text: use https"):
            QdrantIndex.build(vectors, ids, uri=place)
        assert not keys
        monkeypatch.setenv("QDRANT_CLEARTEXT", "1")
        QdrantIndex.build(vectors, ids, uri=place)
        assert keys == {"Very5ecret"}


@pytest.mark.slow
def test_commands_use_a_local_qdrant(tmp_path, toy, small_model, encoder, capsys, monkeypatch):
    place = tmp_path / "qdrant"
    monkeypatch.setenv("QDRANT_URI", str(place))
    texts, queries = toy.random_texts(60, seed=1), toy.random_texts(7, seed=2)
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", texts)
    toy.encode(small_model, corpus, tmp_path / "emb")
    flags = [f"--embeddings={tmp_path}/emb", "--backend=qdrant", f"--corpus={corpus}", f"--uri={place}"]
    assert command("index", *flags, "--collection=docs", f"--output={tmp_path}/index") == 0
    assert "qdrant index of 60 passages" in capsys.readouterr().out
    search = [f"--index={tmp_path}/index", f"--queries={toy.write_queries(tmp_path / 'q.jsonl', queries)}"]
    assert command("search", *search, f"--output={tmp_path}/run", "--k=9") == 0
    passages, asking = encoder.encode_passages(texts), encoder.encode_queries(queries)
    _, found = toy.nearest(passages, [f"d{i}" for i in range(60)], asking, 9)
    assert [list(answers) for answers in read_run(tmp_path / "run").values()] == found
