"""A server process, asked over HTTP by clients good and bad."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from fastapi import HTTPException
from prometheus_client.parser import text_string_to_metric_families

from jaxir.core.errors import UserError
from jaxir.serving.bodies import read_json
from jaxir.serving.guard import Guard
from jaxir.serving.hosts import Hosts
from jaxir.serving.limits import Limits
from jaxir.serving.server import listen

DEEP = b"[" * 100_000


def children(pid: int) -> list[int]:
    return [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]


def talk(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends raw bytes and returns what comes back until the server closes."""
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


def test_search_answers_with_marked_documents(served, world):
    answer = served.ask("/search", queries=["joined arrays", "w7"], k=5)
    assert [r["query"] for r in answer["results"]] == ["joined arrays", "w7"]
    assert [s["cut_at"] for s in served.ask("/search", queries=["w1 " * 20])["results"][0]["systems"]] == [
        *(41, None if world.second_kind == "sparse" else 41),
        41,
    ]
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
    answer = served.ask("/search", queries=["w1"], k=2, documents=False, systems=["dense"])
    (system,) = answer["results"][0]["systems"]
    assert len(system["hits"]) == 2 and set(system["hits"][0]) == {"rank", "id", "score"}


def test_encode_gives_the_models_vectors(served, world):
    texts = ["w1 w2", "w3 " * 500]
    for tower, encode in [
        ("query", world.encoder.encode_queries),
        ("passage", world.encoder.encode_passages),
    ]:
        answer = served.ask("/encode", texts=texts, tower=tower)
        assert answer["fingerprint"] == world.encoder.fingerprint and answer["dimension"] == 32
        np.testing.assert_allclose(answer["vectors"], encode(texts), atol=2e-6)


def test_health_says_what_is_served(served, world):
    status, _, body = served.request("GET", "/healthz")
    health = json.loads(body)
    assert status == 200 and health["status"] == "ok" and health["systems"] == ["dense", "second", "hybrid"]
    facts = [(i["name"], i["kind"], i["documents"]) for i in health["indexes"]]
    assert facts == [("dense", "dense", 64), ("second", world.second_kind, 64)]
    assert [i["has_texts"] for i in health["indexes"]] == [True, True]
    assert [i["query_tokens"] for i in health["indexes"]] == [
        16,
        None if world.second_kind == "sparse" else 16,
    ]
    assert str(world.root) not in body.decode()


def test_a_whole_document_by_its_id(served, world):
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
        ("cats?index=dens", 422, "there is no index 'dens'; there are dense, second; did you mean 'dense'?"),
        ("cats?index=hybrid", 422, "there is no index 'hybrid'; there are dense, second"),
        (f"cats?query={'a' * 2001}", 422, "query: String should have at most 2000 characters"),
    ]
    for path, status, sentence in refusals:
        assert get(quote(path, safe="/?=&")) == (status, {"detail": sentence})


def test_whole_documents_in_answers(served, world):
    answer = served.ask("/search", queries=["joined arrays"], k=64, full=True)
    hits = {h["id"]: h for s in answer["results"][0]["systems"] for h in s["hits"]}
    for doc_id, record in world.documents.items():
        expected = {"id": doc_id, "title": record["title"], "text": record["text"]}
        assert hits[doc_id]["document"] == expected | {"metadata": record.get("metadata")}
    assert hits["cats"]["snippet"]["matches"]
    bare = served.ask("/search", queries=["w1"], k=1, full=True, documents=False, systems=["dense"])
    assert set(bare["results"][0]["systems"][0]["hits"][0]) == {"rank", "id", "score", "document"}
    status, _, body = served.request("POST", "/search", {"queries": ["w1"] * 20, "k": 64, "full": True})
    assert status == 422 and b"full: these documents have more than 30,000 characters" in body


def test_examples_are_of_the_documents(served, world):
    examples = json.loads(served.request("GET", "/examples")[2])["examples"]
    assert len(examples) == 4 and set(examples) <= {r["title"] for r in world.documents.values()}


def series(served) -> dict[tuple[str, ...], float]:
    """What /metrics says, by name and values of labels, in the order of the labels' names."""
    status, headers, body = served.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(body.decode())
    return {
        (s.name, *(value for _, value in sorted(s.labels.items()))): s.value
        for f in families
        for s in f.samples
    }


def test_metrics_count_what_is_asked(served, world):
    before = series(served)
    served.ask("/search", queries=["w1", "w2", "w3"], systems=["dense"])
    served.request("POST", "/search", b"nonsense", **{"content-type": "application/json"})
    served.request("GET", "/document/cats?query=secret")
    served.request("GET", "/document/nothing")
    served.request("BREW", "/nowhere/at/all")
    talk(served.address, b"\0\xff\r\n\r\n")
    after = series(served)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    for endpoint, method, status in [
        ("/search", "POST", "200"),
        ("/search", "POST", "400"),
        ("/document/{doc_id}", "GET", "200"),
        ("/document/{doc_id}", "GET", "404"),
        ("other", "other", "404"),
        ("other", "other", "400"),
        ("/metrics", "GET", "200"),
    ]:
        assert grown["jaxir_requests_total", endpoint, method, status] == 1
    assert grown["jaxir_request_seconds_count", "/search"] == 2
    assert grown["jaxir_request_seconds_bucket", "/search", "+Inf"] == 2
    engine = ("dense", "query") if world.second_kind == "sparse" else ("dense,second", "query")
    assert grown["jaxir_batch_size_sum", *engine] == 3
    assert 1 <= grown["jaxir_batch_size_count", *engine] <= 3
    assert (
        grown["jaxir_batch_size_bucket", engine[0], "64.0", engine[1]]
        == grown["jaxir_batch_size_count", *engine]
    )
    assert after["jaxir_queue_length", *engine] == 0 and after["jaxir_requests_in_progress",] == 1
    assert after["jaxir_texts_cut_total", engine[0], "query"] >= 0
    assert grown["jaxir_engine_busy_seconds_total", *engine] > 0
    assert after["jaxir_compiled_shapes", *engine] > 3 and grown["jaxir_compiled_shapes", *engine] == 0
    assert after["jaxir_index_documents", "exact", "dense"] == 64
    assert after["process_resident_memory_bytes",] > 1e6
    for kind in ("application/openmetrics-text; version=new", "text/plain; version=1.x"):
        status, headers, _ = served.request("GET", "/metrics", accept=kind)
        assert (status, headers["content-type"][:24]) == (200, "text/plain; version=0.0.")


def read_until(path: Path, pattern: str) -> str:
    """Returns a log once it has the pattern: a line is written when its answer has been sent."""
    deadline = time.monotonic() + 20
    while not re.search(pattern, text := path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert re.search(pattern, text), text[-2000:]
    return text


def test_a_line_for_each_request_and_no_question_in_it(served):
    served.ask("/search", queries=["a secret of w1"])
    served.request("GET", "/?q=a%20secret")
    served.request("GET", "/document/no%0Athing?query=secret")
    served.request("GET", "/" + "x" * 1000)
    talk(served.address, b"secret\r\n\r\n")
    line = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 127\.0\.0\.1 %s \d+\.\dms\n"
    asked = [
        "POST /search 200",
        "GET / 200",
        "GET /document/no%0Athing 404",
        f"GET /{'x' * 199} 404",
        "- - 400",
    ]
    log = read_until(served.log, "".join(line % re.escape(each) for each in asked) + "$")
    assert "secret" not in log


def test_too_many_connections_are_refused_in_a_sentence(served):
    with contextlib.ExitStack() as stack:
        for _ in range(502):
            stack.enter_context(socket.create_connection(served.address))
        status, headers, body = served.request("GET", "/healthz")
    assert (status, json.loads(body)) == (503, {"detail": "500 connections are open already"})
    assert headers["retry-after"] == "1"


def test_an_index_without_texts(without_texts):
    status, _, body = without_texts.request("GET", "/document/cats")
    assert status == 404
    assert b"the indexes here were built without --corpus" in body
    assert json.loads(without_texts.request("GET", "/examples")[2]) == {"examples": []}
    answer = without_texts.ask("/search", queries=["w1"], k=1, full=True)
    (hit,) = answer["results"][0]["systems"][0]["hits"]
    assert hit["document"] is None and hit["title"]["text"] == ""
    lines = read_until(
        without_texts.log.with_name("access.log"), r"POST /search 200 [\d.]+ms\n$"
    ).splitlines()
    assert [line.split()[2:5] for line in lines[-3:]] == [
        ["GET", "/document/cats", "404"],
        ["GET", "/examples", "200"],
        ["POST", "/search", "200"],
    ]
    assert re.fullmatch("loading .*\n", without_texts.log.read_text())


def test_documentation_needs_no_other_host(served):
    status, headers, body = served.request("GET", "/docs")
    text = body.decode()
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=.(https?:)?//", text) and "POST /search" in text
    openapi = json.loads(served.request("GET", "/openapi.json")[2])
    assert set(openapi["paths"]) == {
        "/search", "/encode", "/document/{doc_id}", "/examples", "/metrics", "/healthz"
    }  # fmt: skip
    for path, methods in openapi["paths"].items():
        assert f"{next(iter(methods)).upper()} {path}" in text
        assert {"400", "408", "413", "500", "503"} < set(next(iter(methods.values()))["responses"])
    schemas = openapi["components"]["schemas"]
    assert schemas["SearchRequest"]["properties"]["queries"]["maxItems"] == 64
    for name in schemas:
        assert f'id="{name}"' in text
    for name in re.findall(r'href="#(\w+)"', text):
        assert name in schemas
    assert served.request("GET", "/")[1]["content-security-policy"].startswith(
        "default-src 'none'; script-src 'sha"
    )


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 422, "Field required"),
        (b"nonsense", 400, "the body is not JSON"),
        (b"\xff\xfe{", 400, "There was an error parsing the body"),
        (DEEP, 422, "the body has more than 368 keys and values. The keys are queries (at most 64), k, "),
        (b"[" * 300, 400, "the body is not JSON"),
        (b'{"queries": ["a"], "k": ' + b"9" * 5000 + b"}", 400, "There was an error parsing the body"),
        (b"[]", 422, "Input should be a valid dictionary"),
        (b"{}", 422, "queries: Field required"),
        (b'{"queries": []}', 422, "queries: List should have at least 1 item"),
        (b'{"queries": "a"}', 422, "queries: Input should be a valid list"),
        (b'{"queries": [1]}', 422, "queries.0: Input should be a valid string"),
        (b'{"queries": [""]}', 422, "queries.0: String should have at least 1 character"),
        (b'{"queries": ["  "]}', 422, "queries.0: there is no text in it"),
        (b'{"queries": ["a", "\\u200b\\u0000"]}', 422, "queries.1: there is no text in it"),
        (b'{"queries": ["\\ud800"]}', 422, "queries.0: Input should be a valid string"),
        (b'{"queries": ["a"], "\\ud800": 1}', 422, "unknown key '\\ud800'. The keys are"),
        (json.dumps({"queries": ["a" * 2001]}).encode(), 422, "queries.0: String should have at most 2000"),
        (json.dumps({"queries": ["a"] * 65}).encode(), 422, "queries: List should have at most 64 items"),
        (b'{"queries": ["a"], "k": 0}', 422, "k: Input should be greater than or equal to 1"),
        (b'{"queries": ["a"], "k": 101}', 422, "k: Input should be less than or equal to 100"),
        (b'{"queries": ["a"], "k": "7"}', 422, "k: Input should be a valid integer"),
        (b'{"queries": ["a"], "k": NaN}', 422, "k: Input should be a valid integer"),
        (b'{"queries": ["a"], "kk": 7}', 422, "unknown key 'kk'; did you mean 'k'? The keys are"),
        (b'{"top_k": 3}', 422, "unknown key 'top_k'; did you mean 'k'? The keys are queries"),
        (b'{"query": "a", "b": 1, "c": 2}', 422, "unknown key 'query' (and 2 more); did you mean 'queries'?"),
        (b'{"queries": ["a", "\\\\\\",[{"], "k": 0}', 422, "k: Input should be greater than or equal to 1"),
        (json.dumps({"queries": ["a,[{\"\\"] * 50, "k": 0}).encode(), 422, "k: Input should be greater"),
        (json.dumps({"queries": ["a"] * 900}).encode(), 422, "the body has more than 368 keys and values"),
        (b'{"queries": ["a"], "systems": []}', 422, "systems: List should have at least 1 item"),
        (b'{"queries": ["a"], "systems": ["dens"]}', 422, "there is no system 'dens'; there are"),
    ],
)  # fmt: skip
def test_malformed_requests_cost_one_sentence(served, body, status, sentence):
    got, _, content = served.request("POST", "/search", body, **{"content-type": "application/json"})
    assert (got, json.loads(content)["detail"][: len(sentence)]) == (status, sentence)


@pytest.mark.parametrize("unit", ['"a": 1,', "[],", "1,", r'"\n\"",', '{"a":'])
def test_ten_large_bodies_are_refused_in_less_than_a_fifth_of_a_second(unit):
    """The event loop of all clients reads them: seconds of one would be seconds of everybody."""
    body = ('{"queries": ["a"], "k": [' + unit * (1_700_000 // len(unit))).encode()
    started = time.thread_time()
    for _ in range(10):
        with pytest.raises(HTTPException, match="422: the body has more than 368 keys and values"):
            read_json(body, keys={"queries": 64, "k": None}, most=368)
    assert time.thread_time() - started < 0.2


def test_an_address_of_many_parameters_is_refused(served):
    status, _, body = served.request("GET", "/document/cats?" + "a=1&" * 12_000)
    assert (status, json.loads(body)) == (400, {"detail": "the address has more than 50 parameters"})


@pytest.mark.parametrize("tower", ["query", "passage"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "texts.1: String should have at least 1 character"),
        (" \n\u200b\0", "texts.1: there is no text in it"),
        ("\ud800", "texts.1: Input should be a valid string"),
    ],
)
def test_encode_refuses_empty_and_malformed_texts(served, tower, text, sentence):
    """Half of a surrogate pair would fail the texts of others that are encoded together with it."""
    status, _, content = served.request("POST", "/encode", {"texts": ["a", text], "tower": tower})
    assert (status, json.loads(content)["detail"][: len(sentence)]) == (422, sentence)


def test_other_refusals(served):
    long = {"texts": ["a" * 2001]}
    assert b"texts.0: a query may have 2,000 characters" in served.request("POST", "/encode", long)[2]
    assert served.request("POST", "/encode", long | {"tower": "passage"})[0] == 200
    assert (
        b"no index 'no' here has a model"
        in served.request("POST", "/encode", {"texts": ["a"], "index": "no"})[2]
    )
    assert served.request("GET", "/nothing")[0] == 404
    assert served.request("GET", "/search")[0] == 405
    # A page of another site can send text without asking first, and by its own name for this address.
    for path, kind in (("/search", "text/plain"), ("/encode", "application/x-www-form-urlencoded")):
        status, _, body = served.request("POST", path, b'{"queries": ["a"]}', **{"content-type": kind})
        assert status == 422
        assert json.loads(body)["detail"] == "the request needs the header content-type: application/json"
    status, _, body = served.request("GET", "/healthz", host="evil.example:80")
    refusal = "this service is not called 'evil.example': start it with --allowed_hosts=evil.example, or use"
    assert (status, json.loads(body)["detail"]) == (400, f"{refusal} its IP address")
    assert served.request("GET", "/healthz", host="10.244.1.7:8080")[0] == 200


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [
        ("localhost:8080", True),
        ("LOCALHOST.", True),
        ("127.0.0.3", True),
        ("10.244.1.7:8080", True),  # a Kubernetes probe: the pod's address
        ("[fd00::7]:8080", True),
        ("", True),  # HTTP/1.0 without the header: no browser sends it
        ("jaxir:8080", True),
        ("Search.Example.ORG", True),
        ("xn--bcher-kva.example", True),
        ("a.b.example.net", True),
        ("example.net", False),
        ("evil.example:80", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("search.example.org.evil", False),
        ("[evil]", False),
        ("fd00::7", False),
        ("127.0.0.1:80:80", False),
    ],
)
def test_addresses_and_listed_names_are_accepted_and_no_others(header, is_accepted):
    listed = ["jaxir", "search.example.org", "bücher.example", "*.example.net", "10.0.0.1", "::1"]
    assert (Hosts(listed, "0.0.0.0").refusal(header) is None) == is_accepted
    assert Hosts(["*"]).refusal(header) is None
    if not is_accepted:
        assert "--allowed_hosts" in Hosts().refusal(header)


def test_the_flag_takes_names_alone_and_the_name_it_listens_to_is_listed():
    assert Hosts([], "search.lan").refusal("search.lan:80") is None
    for entry in ("http://a.example", "a.example:80", "a.example/x", "", "*.", "a..b", "*example"):
        with pytest.raises(UserError, match=f"--allowed_hosts has {re.escape(repr(entry))}: give names"):
            Hosts([entry])


def test_no_address_leads_to_another_one(served):
    """Behind a proxy, which sends Host: localhost, that would be one of the client's own machine."""
    for method, path, body in (("GET", "/docs/", None), ("POST", "/search/", {"queries": ["w1"]})):
        status, headers, content = served.request(method, path, body, host="localhost")
        assert (status, json.loads(content)) == (404, {"detail": "Not Found"})
        assert "location" not in headers


def test_huge_bodies_are_refused_whether_announced_or_not(served):
    body = b"x" * 3_000_000
    status, headers, content = served.request("POST", "/search", body, **{"content-type": "application/json"})
    assert status == 413 and headers["connection"] == "close"
    assert json.loads(content)["detail"] == "a request's body may have 200,000 bytes"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    head = b"POST /search HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    assert talk(served.address, head, *[chunk] * 40, b"0\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    announced = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999\r\n\r\n"
    assert talk(served.address, announced).startswith(b"HTTP/1.1 413 ")


def test_slow_and_broken_clients_are_let_go(served):
    started = time.monotonic()
    head = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    scenes = {
        "body": (head + b"content-length: 100\r\n\r\n", *[b" "] * 20),
        "no body": (head + b"content-length: 100\r\n\r\n",),
        "head": tuple(head[i : i + 1] for i in range(40)),
        "nothing": (),
        "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50 + b"\r\n\r\n",),
        "endless head": (b"GET / HTTP/1.1\r\n", *[b"a: " + b"b" * 10_000 + b"\r\n"] * 20),
    }
    with concurrent.futures.ThreadPoolExecutor(len(scenes)) as pool:
        talks = {
            name: pool.submit(talk, served.address, *parts, pause=0.1 if len(parts) > 18 else 0)
            for name, parts in scenes.items()
        }
        answers = {name: future.result() for name, future in talks.items()}
    assert time.monotonic() - started < 15
    assert answers["body"].startswith(b"HTTP/1.1 408 ") and answers["no body"].startswith(b"HTTP/1.1 408 ")
    assert b"the request's body did not arrive within 1 s" in answers["body"]
    assert answers["head"] == answers["nothing"] == b""
    assert answers["garbage"].endswith(b'{"detail": "this is no HTTP request"}')
    assert answers["garbage"].startswith(b"HTTP/1.1 400 ") and answers["endless head"].startswith(
        b"HTTP/1.1 400 "
    )
    assert served.ask("/search", queries=["w1"])


def holds(server: tuple[str, int], client: tuple[str, int]) -> bool:
    """Whether the server's process still has its end of a connection (the kernel's may outlive it)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [
        row[9] for row in rows if [int(row[i].split(":")[1], 16) for i in (1, 2)] == [server[1], client[1]]
    ]
    return any(inode != "0" for inode in ends)


def test_a_client_that_does_not_read_is_let_go(served):
    body = json.dumps({"queries": ["w1 w2"] * 64, "k": 64}).encode()
    head = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(served.address)
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        ends = served.address, connection.getsockname()
        assert holds(*ends)
        deadline = time.monotonic() + 20
        while holds(*ends) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not holds(*ends)
    assert served.ask("/search", queries=["w1"])


def disturb(served, until: float) -> int:
    """Sends what is malformed, huge, cut off and slow until a time; returns how often."""
    count = 0
    head = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
    while time.monotonic() < until:
        talk(served.address, b"\0\xff" * 100 + b"\r\n\r\n")
        talk(served.address, head + b"3000000\r\n\r\n", b"x" * 3_000_000)
        talk(
            served.address,
            head + b"100000\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n",
            DEEP,
        )
        with socket.create_connection(served.address) as connection:
            connection.sendall(head + b"5000\r\n\r\n{")
        count += 1
    return count


def crowd(served, bench, clients: int, seconds: float):
    queries = [f"w{i} w{i * 7 % 199} joins" for i in range(199)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(disturb, served, time.monotonic() + seconds)
        load = asyncio.run(bench.hammer(served.url, queries, clients=clients, seconds=seconds))
        assert disturbed.result() > 0
    assert load.failures == []
    assert len(load.seconds) >= 2 * clients
    return load


def test_fifty_clients_at_once(served, bench):
    crowd(served, bench, 50, 3)


@pytest.mark.slow
def test_two_hundred_clients_for_a_minute(served, bench):
    load = crowd(served, bench, 200, 60)
    assert load.percentile(0.99) < 20_000


@pytest.mark.slow
def test_sigterm_ends_what_is_under_way_and_leaves_no_process(tmp_path, start):
    with start(tmp_path) as server:
        process, offspring = server.process, children(server.process.pid)
        body = json.dumps({"queries": ["w1"]}).encode()
        head = (
            b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        with socket.create_connection(server.address, timeout=30) as connection:
            connection.sendall(head + body[:5])
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            connection.sendall(body[5:])
            answer = b""
            while data := connection.recv(65536):
                answer += data
        assert answer.startswith(b"HTTP/1.1 200 ") and b'"hybrid"' in answer
        assert process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/stat").exists() for pid in offspring) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in offspring if Path(f"/proc/{pid}/stat").exists()]
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_unanswered_requests_get_503_at_shutdown(tmp_path, world, start_over):
    """The request's body never comes; the time for answers under way is 15 s."""
    (tmp_path / "limits.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from jaxir import serve\n"
        "from jaxir.serving import limits\n"
        "serve.serve.limits = @limits.Limits()\n"
        "limits.Limits.body_seconds = 60.0\n"
        "limits.Limits.answer_seconds = 60.0\n"
    )
    flags = (f"--index={world.root}/without_texts", f"--gin_file={tmp_path}/limits.gin")
    head = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
    with start_over(tmp_path, *flags) as server:
        with socket.create_connection(server.address, timeout=60) as connection:
            connection.sendall(head + b"{")
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            answer = b""
            while data := connection.recv(65536):
                answer += data
        assert server.process.wait(30) == 0
    assert answer.startswith(b"HTTP/1.1 503 ") and answer.endswith(b'{"detail": "the service ends"}')
    log = server.log.read_text()
    assert "POST /search 503" in log and "Traceback" not in log


def test_an_address_is_taken_before_anything_is_loaded():
    """Of two services that start together one loads its models, and the other one ends."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=f"on 127.0.0.1, port {port}: address already in use"):
            listen("127.0.0.1", port)


def test_an_address_in_use_is_told_before_anything_is_loaded(served, capsys):
    from jaxir import cli

    port = served.address[1]
    assert cli.main("jaxir.serve:serve", ["--index=nothing", f"--port={port}"]) == 1
    assert capsys.readouterr().err == (
        f"error: cannot serve on 127.0.0.1, port {port}: address already in use (--host, --port)\n"
    )
    assert cli.main("jaxir.serve:serve", ["--index=nothing", "--port=99999"]) == 2
    assert "--port must be a whole number from 0 to 65535, not 99999" in capsys.readouterr().err
    assert cli.main("jaxir.serve:serve", ["--index=nothing", "--port=0"]) == 1
    assert "nothing is not an index" in capsys.readouterr().err


def test_help_is_quick_and_needs_no_jax():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jaxir.serve", "--help"],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
    )
    assert done.returncode == 0 and "--index" in done.stdout
    assert not re.search(r"\| +(jax|fastapi|uvicorn)$", done.stderr, re.M)


@pytest.mark.slow
def test_a_damaged_index_is_told_with_a_detail_and_without_its_path(tmp_path, world, start_over):
    shutil.copytree(f"{world.root}/dense", tmp_path / "dense")
    path = tmp_path / "dense/documents.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    with start_over(tmp_path, f"--index={tmp_path}/dense") as server:
        path.write_bytes(b"".join([b"?" * (len(lines[0]) - 1) + b"\n", *lines[1:]]))  # the first is "cats"
        sentence = "the document 'cats' is not there as it was stored; index again"
        told = {"detail": f"the index is damaged: {sentence}"}
        for method, where, body in (
            ("GET", "/document/cats", None),
            ("POST", "/search", {"queries": ["joined arrays"], "k": 64}),
            ("POST", "/search", {"queries": ["joined arrays"], "k": 64, "full": True, "documents": False}),
        ):
            status, _, content = server.request(method, where, body)
            assert (status, json.loads(content)) == (500, told)
        assert server.request("GET", "/document/plain")[0] == 200
        assert server.ask("/search", queries=["joined arrays"], k=64, documents=False)["results"]
    log = server.log.read_text()
    assert f"error: {path} is damaged: the document 'cats'" in log and "Traceback" not in log


def test_a_fault_outside_the_application_has_a_detail_too():
    async def broken(scope, receive, send):
        raise ZeroDivisionError

    async def ask() -> list[dict]:
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        guard = Guard(broken, limits=Limits(), connections=lambda: 1)
        with pytest.raises(ZeroDivisionError):
            await guard({"type": "http", "headers": []}, receive, send)
        return sent

    begin, *parts = asyncio.run(ask())
    assert begin["status"] == 500
    assert json.loads(b"".join(part["body"] for part in parts)) == {"detail": "a fault of the service"}
