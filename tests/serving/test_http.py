import asyncio
import concurrent.futures
import json
import re
import signal
import socket
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import serve as bench
from tests.serving.conftest import running, write_limits


def children(pid: int) -> list[int]:
    return [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]


def talk(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends raw bytes and returns the answer up to the server's close."""
    with socket.create_connection(address, timeout=30) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(pause)
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
        return answer


def test_search_returns_highlighted_documents(served, world):
    answer = served.ask("/search", queries=["joined arrays", "w7"], k=5)
    assert [r["query"] for r in answer["results"]] == ["joined arrays", "w7"]
    cuts = [s["cut_at"] for s in served.ask("/search", queries=[" w1" * 20])["results"][0]["systems"]]
    # Texts are cut after 42 characters, counting the blank at the beginning.
    assert cuts == [42, None if world.second_kind == "sparse" else 42, 42]
    first = {s["system"]: s for s in answer["results"][0]["systems"]}
    assert list(first) == ["dense", "second", "hybrid"]
    assert [h["rank"] for h in first["hybrid"]["hits"]] == [1, 2, 3, 4, 5]
    assert first["dense"]["ms"]["total"] >= first["dense"]["ms"]["encode"] > 0
    everything = served.ask("/search", queries=["joined arrays"], k=64)["results"][0]["systems"]
    hits = {hit["id"]: hit for system in everything for hit in system["hits"]}
    assert set(hits) == set(world.ids)
    title, snippet = hits["cats"]["title"], hits["cats"]["snippet"]
    assert title == {"text": "Joining arrays", "matches": [[0, 7], [8, 14]]}
    assert [snippet["text"][a:b] for a, b in snippet["matches"]] == ["array", "joined"]
    assert hits["plain"]["title"] == {"text": "", "matches": []}
    assert hits["plain"]["snippet"] == {"text": "w7 w8 𝒳🙂 arrays w9", "matches": [[9, 15]]}
    if world.second_kind == "sparse":
        assert {h["id"] for h in first["second"]["hits"]} == {"cats", "xss", "plain"}
        assert first["second"]["hits"][0]["id"] == "cats"


def test_ids_only_and_one_system(served):
    for name in ("dense", "hybrid"):
        answer = served.ask("/search", queries=[" w1 "], k=2, documents=False, systems=[name])["results"][0]
        (system,) = answer["systems"]
        assert answer["query"] == " w1 ", "white space changes some models' vectors"
        assert system["system"] == name and system["ms"]["total"] > 0
        assert len(system["hits"]) == 2 and set(system["hits"][0]) == {"rank", "id", "score"}


def test_health_describes_the_service_without_paths(served, world):
    status, _, body = served.request("GET", "/healthz")
    health = json.loads(body)
    assert status == 200 and health["status"] == "ok" and health["systems"] == ["dense", "second", "hybrid"]
    facts = [(i["name"], i["kind"], i["documents"]) for i in health["indexes"]]
    assert facts == [("dense", "dense", 64), ("second", world.second_kind, 64)]
    assert [i["has_texts"] for i in health["indexes"]] == [True, True]
    tokens = [16, None if world.second_kind == "sparse" else 16]
    assert [i["query_tokens"] for i in health["indexes"]] == tokens
    assert str(world.root) not in body.decode()


def test_document_by_id(served, world):
    def get(path: str) -> tuple[int, dict]:
        status, _, body = served.request("GET", f"/document/{path}")
        return status, json.loads(body)

    status, document = get("xss?query=joined%20ends&index=second")
    record = world.documents["xss"]
    assert status == 200 and document["index"] == "second" and document["metadata"] == record["metadata"]
    assert (document["title"], document["text"]) == (record["title"], record["text"])
    assert [record["text"][a:b] for a, b in document["text_matches"]] == ["joins", "end"]
    assert document["title_matches"] == []
    status, document = get(quote(world.special_id))
    assert (status, document["id"], document["text"]) == (200, world.special_id, "w11")
    assert (document["metadata"], document["index"], document["text_matches"]) == (None, "dense", [])
    assert get(quote(world.special_id, safe=""))[0] == 200
    refusals = [
        ("nothing/é", 404, "there is no document 'nothing/é' in dense or second"),
        ("", 404, "there is no document '' in dense or second"),
        ("cats?index=dens", 422, "unknown index 'dens'; give one of dense, second; did you mean 'dense'?"),
        ("cats?index=hybrid", 422, "unknown index 'hybrid'; give one of dense, second"),
        (f"cats?query={'a' * 2001}", 422, "query: String should have at most 2000 characters"),
    ]
    for path, status, sentence in refusals:
        assert get(quote(path, safe="/?=&")) == (status, {"detail": sentence})


def test_full_search_returns_whole_documents(served, world):
    answer = served.ask("/search", queries=["joined arrays"], k=64, full=True)
    hits = {h["id"]: h for s in answer["results"][0]["systems"] for h in s["hits"]}
    for doc_id, record in world.documents.items():
        expected = {"id": doc_id, "title": record["title"], "text": record["text"]}
        assert hits[doc_id]["document"] == expected | {"metadata": record.get("metadata")}
    assert hits["cats"]["snippet"]["matches"]
    bare = served.ask("/search", queries=["w1"], k=1, full=True, documents=False, systems=["dense"])
    assert set(bare["results"][0]["systems"][0]["hits"][0]) == {"rank", "id", "score", "document"}


def series(served) -> dict[tuple[str, ...], float]:
    """Returns all metrics by name and label values, ordered by label name."""
    status, headers, body = served.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(body.decode())
    return {
        (s.name, *(value for _, value in sorted(s.labels.items()))): s.value
        for f in families
        for s in f.samples
    }


def test_metrics_count_requests_and_batches(served, world):
    before = series(served)
    served.ask("/search", queries=["w1", "w2", "w3"], systems=["dense"])
    served.request("POST", "/search", b"nonsense", **{"content-type": "application/json"})
    served.request("GET", "/document/cats?query=secret")
    served.request("GET", "/document/nothing")
    served.request("BREW", "/nowhere/at/all")
    after = series(served)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    for endpoint, method, status in [
        ("/search", "POST", "200"),
        ("/search", "POST", "400"),
        ("/document/{doc_id}", "GET", "200"),
        ("/document/{doc_id}", "GET", "404"),
        ("other", "other", "404"),
        ("/metrics", "GET", "200"),
    ]:
        assert grown["jaxir_requests_total", endpoint, method, status] == 1
    assert grown["jaxir_request_seconds_count", "/search"] == 2
    assert grown["jaxir_request_seconds_bucket", "/search", "+Inf"] == 2
    engine = ("dense", "query") if world.second_kind == "sparse" else ("dense,second", "query")
    assert grown["jaxir_batch_size_sum", *engine] == 3
    assert 1 <= grown["jaxir_batch_size_count", *engine] <= 3
    assert after["jaxir_queue_length", *engine] == 0 and after["jaxir_requests_in_progress",] == 1
    assert after["jaxir_texts_cut_total", engine[0], "query"] >= 0
    assert grown["jaxir_engine_busy_seconds_total", *engine] > 0
    assert after["jaxir_compiled_shapes", *engine] >= 1
    assert after["jaxir_index_documents", "exact", "dense"] == 64
    assert after["process_resident_memory_bytes",] > 1e6


def read_until(path: Path, pattern: str) -> str:
    """Returns a log once it has the pattern; lines appear after their answers."""
    deadline = time.monotonic() + 20
    while not re.search(pattern, text := path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert re.search(pattern, text), text[-2000:]
    return text


def test_access_log_has_every_request_but_no_question(served):
    served.ask("/search", queries=["a secret of w1"])
    served.request("GET", "/?q=a%20secret")
    served.request("GET", "/document/no%0Athing?query=secret")
    served.request("GET", "/" + "x" * 1000)
    line = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 127\.0\.0\.1 %s \d+\.\dms\n"
    asked = ["POST /search 200", "GET / 200", "GET /document/no%0Athing 404", f"GET /{'x' * 199} 404"]
    log = read_until(served.log, "".join(line % re.escape(each) for each in asked) + "$")
    assert "secret" not in log


@pytest.mark.slow
def test_index_without_texts_is_searched_by_id(without_texts):
    status, _, body = without_texts.request("GET", "/document/cats")
    assert status == 404
    assert b"the indexes here were built without jaxir.index --corpus" in body
    assert json.loads(without_texts.request("GET", "/examples")[2]) == {"examples": []}
    answer = without_texts.ask("/search", queries=["w1"], k=1, full=True)
    (hit,) = answer["results"][0]["systems"][0]["hits"]
    assert hit["document"] is None and hit["title"]["text"] == ""
    log = read_until(without_texts.log.with_name("access.log"), r"POST /search 200 [\d.]+ms\n$")
    asked = [" ".join(line.split()[2:5]) for line in log.splitlines()[-3:]]
    assert asked == ["GET /document/cats 404", "GET /examples 200", "POST /search 200"]


def test_reference_page_is_self_contained_and_complete(served):
    status, headers, body = served.request("GET", "/docs")
    text = body.decode()
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=.(https?:)?//", text) and "POST /search" in text
    openapi = json.loads(served.request("GET", "/openapi.json")[2])
    assert set(openapi["paths"]) == {
        "/search", "/encode", "/document/{doc_id}", "/examples", "/metrics", "/healthz", "/v1/embeddings",
        "/embeddings", "/v1/models", "/v1/models/{model}", "/embed", "/similarity", "/info", "/health",
        "/rerank", "/v1/rerank", "/v2/rerank", "/embed_all", "/embed_sparse", "/pooling",
    }  # fmt: skip
    for path, methods in openapi["paths"].items():
        assert f"{next(iter(methods)).upper()} {path}" in text
        assert {"400", "408", "413", "500", "503"} < set(next(iter(methods.values()))["responses"])
    schemas = openapi["components"]["schemas"]
    assert schemas["SearchRequest"]["properties"]["queries"]["maxItems"] == 64
    assert set(re.findall(r'href="#(\w+)"', text)) <= set(schemas) <= set(re.findall(r'id="(\w+)"', text))
    policy = served.request("GET", "/")[1]["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha")


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"nonsense", 400, "the request's body is not valid JSON"),
        (b"\xff\xfe{", 400, "There was an error parsing the body"),
        (b"[]", 422, "Input should be a valid dictionary"),
        (b"{}", 422, "queries: Field required"),
        (b'{"queries": [""]}', 422, "queries.0: String should have at least 1 character"),
        (b'{"queries": ["a", "\\u200b\\u0000"]}', 422, "queries.1: the text has no visible characters"),
        (b'{"queries": ["\\ud800"]}', 422, "queries.0: Input should be a valid string"),
        (json.dumps({"queries": ["a" * 2001]}).encode(), 422, "queries.0: String should have at most 2000"),
        (json.dumps({"queries": ["a"] * 65}).encode(), 422, "queries: List should have at most 64 items"),
        (b'{"queries": ["a"], "k": 101}', 422, "k: Input should be less than or equal to 100"),
        (b'{"queries": ["a"], "k": "7"}', 422, "k: Input should be a valid integer"),
        (b'{"top_k": 3}', 422, "unknown key 'top_k'; did you mean 'k'? The keys are queries"),
        (b'{"query": "a", "b": 1}', 422, "unknown key 'query'; did you mean 'queries'?"),
        (b'{"queries": ["a"], "\\ud800": 1}', 422, "unknown key '\\ud800'. The keys are"),
        (b'{"queries": ["a"], "systems": ["dens"]}', 422, "unknown system 'dens'; give one of"),
        (b'{"texts": ["a", " \\n\\u200b\\u0000"]}', 422, "texts.1: the text has no visible characters"),
        (b'{"texts": ["a", "\\ud800"]}', 422, "texts.1: Input should be a valid string"),
        (b"a" * 3_000_000, 413, "a request's body may have at most 200,000 bytes"),
    ],
)  # fmt: skip
def test_malformed_requests_get_one_sentence(served, body, status, sentence):
    path = "/encode" if b"texts" in body else "/search"
    got, _, content = served.request("POST", path, body, **{"content-type": "application/json"})
    assert (got, json.loads(content)["detail"][: len(sentence)]) == (status, sentence)


def test_invalid_texts_methods_types_and_hosts_are_refused(served):
    long = {"texts": ["a" * 2001]}
    assert b"texts.0: a query may have at most 2,000 characters" in served.request("POST", "/encode", long)[2]
    answer = served.ask("/encode", **long, tower="passage")
    assert answer["index"] == "dense" and np.shape(answer["vectors"]) == (1, answer["dimension"])
    unknown = served.request("POST", "/encode", {"texts": ["a"], "index": "no"})[2]
    assert b"no index 'no' here has a model" in unknown
    assert served.request("GET", "/nothing")[0] == 404
    assert served.request("GET", "/search")[0] == 405
    # Browsers send these types to other sites without a preflight request.
    for path, kind in (("/search", "text/plain"), ("/encode", "application/x-www-form-urlencoded")):
        status, _, body = served.request("POST", path, b'{"queries": ["a"]}', **{"content-type": kind})
        assert status == 422
        assert json.loads(body)["detail"] == "the request needs the header content-type: application/json"
    status, _, body = served.request("GET", "/healthz", host="evil.example:80")
    assert status == 400 and b"start it with --allowed_hosts=evil.example" in body
    assert served.request("GET", "/healthz", host="10.244.1.7:8080")[0] == 200


def test_head_answers_as_get_without_a_body(served):
    """Probes of some load balancers and monitors send HEAD."""
    for path, status in (("/health", 200), ("/", 200), ("/v1/models", 200), ("/search", 405), ("/no", 404)):
        answered, headers, body = served.request("HEAD", path)
        assert (answered, body) == (status, b"") and int(headers["content-length"]) > 0


def test_no_redirects(served):
    """Behind a proxy that sends Host: localhost, a redirect would lead clients to their own machine."""
    for method, path, body in (("GET", "/docs/", None), ("POST", "/search/", {"queries": ["w1"]})):
        status, headers, content = served.request(method, path, body, host="localhost")
        assert (status, f"no path {path};".encode() in content) == (404, True)
        assert "location" not in headers


def disturb(served, until: float) -> int:
    """Sends malformed, huge, incomplete and slow requests until a time; returns the number of rounds."""
    count = 0
    head = b"POST /search HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: "
    while time.monotonic() < until:
        talk(served.address, b"\0\xff" * 100 + b"\r\n\r\n")
        talk(served.address, head + b"3000000\r\n\r\n", b"x" * 3_000_000)
        talk(served.address, head + b"100000\r\ncontent-type: application/json\r\n\r\n", b"[" * 100_000)
        with socket.create_connection(served.address) as connection:
            connection.sendall(head + b"5000\r\n\r\n{")
        count += 1
    return count


@pytest.mark.slow
def test_many_clients_are_answered_beside_broken_ones(served):
    clients, seconds = 50, 3
    queries = [f"w{i} w{i * 7 % 199} joins" for i in range(199)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(disturb, served, time.monotonic() + seconds)
        load = asyncio.run(bench.hammer(served.url, queries, clients=clients, seconds=seconds))
        assert disturbed.result() > 0
    assert load.failures == []
    assert len(load.seconds) >= 2 * clients
    assert load.percentile(0.99) < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [True, False])
def test_sigterm_finishes_open_requests_and_leaves_no_process(tmp_path, both_indexes, is_whole):
    """An incomplete request gets a 503 after 15 s."""
    limits = write_limits(tmp_path / "limits.gin", answer_seconds=60.0)
    with running(tmp_path, *both_indexes, limits) as server:
        process, offspring = server.process, children(server.process.pid)
        body = json.dumps({"queries": ["w1"]}).encode()
        head = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(server.address, timeout=60) as connection:
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body[:5])
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            if is_whole:
                connection.sendall(body[5:])
            answer = b""
            while data := connection.recv(65536):
                answer += data
        assert answer.startswith(b"HTTP/1.1 200 " if is_whole else b"HTTP/1.1 503 ")
        assert (b'"hybrid"' if is_whole else b'{"detail":"the service is shutting down"}') in answer
        assert process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/stat").exists() for pid in offspring) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in offspring if Path(f"/proc/{pid}/stat").exists()]
    log = server.log.read_text()
    assert f"POST /search {200 if is_whole else 503}" in log and "Traceback" not in log


def test_address_in_use_is_reported_before_loading(served, capsys):
    from jaxir import cli

    port = served.address[1]
    assert cli.main("jaxir.serve:serve", ["--index=nothing", f"--port={port}"]) == 1
    assert f"cannot serve on --host=127.0.0.1 --port={port}: address already" in capsys.readouterr().err
    assert cli.main("jaxir.serve:serve", ["--index=nothing", "--port=99999"]) == 2
    assert "--port must be a whole number from 0 to 65535, not 99999" in capsys.readouterr().err
    assert cli.main("jaxir.serve:serve", ["--index=nothing", "--port=0"]) == 1
    assert "nothing is not an index" in capsys.readouterr().err
