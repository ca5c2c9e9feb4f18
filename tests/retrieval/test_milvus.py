"""Milvus: embedded in this process, and a server (milvus-lite's own, over TCP) reached by a URI."""

import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.retrieval.indexes import milvus_collection
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.milvus_collection import MilvusCollection
from jaxir.retrieval.indexes.milvus_index import INSIDE, MilvusIndex
from jaxir.retrieval.ranking.runs import read_run

COUNT, DIMENSION = 3000, 16
# Opens an index while a log file is configured, searches and closes it, then opens it again for good.
USER = """
import logging, sys, threading
import numpy as np
from jaxir import load_index
import jaxir.retrieval.indexes.milvus_index
assert not {"pymilvus", "milvus_lite", "faiss", "pandas"} & set(sys.modules)
log = logging.FileHandler(sys.argv[2])
logging.getLogger().addHandler(log)
index = load_index(sys.argv[1])
logging.getLogger().warning("still open")
assert log.stream is not None, "importing pymilvus closes logging handlers"
before = index.search(np.ones([2, 16], np.float32), 3)[1]
index.close()
del index
assert not [t.name for t in threading.enumerate() if "milvus" in t.name], threading.enumerate()
index = load_index(sys.argv[1])
assert index.search(np.ones([2, 16], np.float32), 3)[1] == before
print("ready", flush=True)
threading.Event().wait()
"""


def command(name: str, *flags: str) -> int:
    return cli.main(f"jaxir.{name}:{name}", flags)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(COUNT, DIMENSION)).astype(np.float32)


@pytest.fixture(scope="module")
def ids() -> list[str]:
    return [f"d{i} 'x\" é\n{{}}" for i in range(COUNT)]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    port = free_port()
    data = tmp_path_factory.mktemp("server")
    flags = ["server", f"--data-dir={data}/db", "--host=127.0.0.1", f"--port={port}"]
    with (data / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "milvus_lite", *flags], stdout=log, stderr=log)
    with process:
        try:
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            assert process.poll() is None, (data / "log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def names(uri: str) -> set[str]:
    collection = MilvusCollection(uri, "any")
    found = set(collection._client.list_collections())
    collection.close()
    return found


def test_hnsw_is_approximate_and_survives_saving(tmp_path, toy, vectors, ids):
    queries = vectors[:100] + np.float32(0.1)
    _, expected = toy.nearest(vectors, ids, queries, 10, similarity="dot")
    shards = [vectors[:1000], vectors[1000:]]
    MilvusIndex.build(shards, ids, similarity="dot", index_type="HNSW").save(tmp_path / "index")
    index = load_index(tmp_path / "index")
    assert index.info.settings["index_type"] == "HNSW" and list((tmp_path / "index").rglob("*hnsw*"))
    found = index.search(queries, 10)[1]
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, expected, strict=True)]) > 0.9
    index.close()


@pytest.mark.slow
def test_embedded_milvus_serves_one_process_which_may_be_killed(tmp_path, vectors, ids):
    MilvusIndex.build(vectors, ids).save(tmp_path / "index")
    command = [sys.executable, "-c", USER, str(tmp_path / "index"), str(tmp_path / "log")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryDirectory(prefix="jx") as short,  # the killed process leaves its socket here
        subprocess.Popen(command, **pipes, env=os.environ | {"TMPDIR": short}) as process,
    ):
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            with pytest.raises(UserError, match=r"is open in another process: an embedded Milvus serves one"):
                load_index(tmp_path / "index")
        finally:
            process.kill()
        assert process.stderr.read() == ""
    assert (tmp_path / "log").read_text() == "still open\n"
    one, two = load_index(tmp_path / "index"), load_index(tmp_path / "index")  # both open in one process
    assert one.search(vectors[:3], 1)[1] == two.search(vectors[:3], 1)[1] == [[i] for i in ids[:3]]
    one.close()
    assert two.search(vectors[:3], 1)[1] == one.search(vectors[:3], 1)[1], "a closed index opens again"
    one.close()
    two.close()
    assert not [t for t in threading.enumerate() if "milvus" in t.name]


def test_index_without_checksums_or_with_left_files_still_opens(tmp_path, vectors, ids):
    """Older indexes have no checksums of Milvus' files, and a killed search may leave files."""
    MilvusIndex.build(vectors[:100], ids[:100]).save(tmp_path / "index")
    sums = tmp_path / "index" / "SHA256SUMS"
    listed = [line for line in sums.read_text().splitlines(keepends=True) if INSIDE not in line]
    assert len(listed) == 3
    (tmp_path / "index" / INSIDE / "collections" / "left.tmp").write_text("")
    load_index(tmp_path / "index").close()
    sums.write_text("".join(listed))
    load_index(tmp_path / "index").close()


def test_embedded_milvus_elsewhere_holds_several_collections(tmp_path, vectors, ids, monkeypatch):
    database = tmp_path / "elsewhere" / "all.milvus"
    MilvusIndex.build(vectors[:50], ids[:50], uri=database, collection="one").save(tmp_path / "one")
    MilvusIndex.build(vectors[50:90], ids[50:90], uri=database, collection="two").save(tmp_path / "two")
    assert not (tmp_path / "one" / INSIDE).exists()
    with pytest.raises(UserError, match=r"if you name it: set MILVUS_URI=/.*/elsewhere/all.milvus"):
        load_index(tmp_path / "one")
    monkeypatch.setenv("MILVUS_URI", f"{database}/")
    for name, row in (("one", 3), ("two", 53)):
        index = load_index(tmp_path / name)
        assert index.search(vectors[[row]], 1)[1] == [[ids[row]]]
        index.close()
    with pytest.raises(UserError, match=r"all.milvus already has a collection one"):
        MilvusIndex.build(vectors[:50], ids[:50], uri=database, collection="one")


def test_collection_of_another_index_is_refused(tmp_path, vectors, ids, monkeypatch):
    """The other collection has the same name, and as many vectors of the same size."""
    database = tmp_path / "all.milvus"
    monkeypatch.setenv("MILVUS_URI", str(database))
    for name, found in (("old", vectors[:50]), ("new", vectors[50:100])):
        index = MilvusIndex.build(found, ids[:50], uri=database)
        index.save(tmp_path / name)
        index.close()
        if name == "old":
            collection = MilvusCollection(database, "passages")
            collection.drop()
            collection.close()
    with pytest.raises(UserError, match=r"passages in .* was made by another index"):
        load_index(tmp_path / "old")
    index = load_index(tmp_path / "new")
    assert index.search(vectors[[53]], 1)[1] == [[ids[3]]]
    index.close()


def test_unreachable_milvus_is_reported_soon(tmp_path, vectors, ids, monkeypatch):
    monkeypatch.setattr(milvus_collection, "CONNECT_SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for uri, message in (
            (f"http://127.0.0.1:{free_port()}", "cannot be reached: Fail connecting"),
            (f"http://127.0.0.1:{silent.getsockname()[1]}", "cannot be reached"),
            ("ftp://127.0.0.1", "cannot be reached: uri: ftp://127.0.0.1 is illegal"),
            ("http://me:secret@127.0.0.1", "must not contain a password"),
            ("localhost:19530", "as http://localhost:19530"),
        ):
            started = time.monotonic()
            with pytest.raises(UserError, match=message) as raised:
                MilvusIndex.build(vectors, ids, uri=uri)
            assert time.monotonic() - started < 10
            assert "\n" not in str(raised.value) and "secret" not in str(raised.value)
    with pytest.raises(UserError, match="must have only letters, digits and _, not 'a-b'"):
        MilvusIndex.build(vectors, ids, uri=tmp_path / "db", collection="a-b")


class Recorder(grpc.GenericRpcHandler):
    """A server that records the method and authorization of every request, and refuses it."""

    def __init__(self):
        self.requests: list[tuple[str, str | None]] = []

    def service(self, call):
        sent = dict(call.invocation_metadata)
        self.requests.append((call.method, sent.get("authorization")))

        def refuse(request, context):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not here")

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture
def recorder() -> Iterator[tuple[Recorder, int]]:
    handler = Recorder()
    pool = ThreadPoolExecutor(2)
    stub = grpc.server(pool, handlers=[handler])
    port = stub.add_insecure_port("0.0.0.0:0")
    stub.start()
    yield handler, port
    stub.stop(grace=None).wait()
    pool.shutdown()


def test_token_is_sent_only_where_the_user_allows(tmp_path, vectors, ids, recorder, capsys, monkeypatch):
    requests, port = recorder[0].requests, recorder[1]
    monkeypatch.setattr(milvus_collection, "CONNECT_SECONDS", 2.0)
    monkeypatch.setenv("MILVUS_TOKEN", "root:Very5ecret")
    token = base64.b64encode(b"root:Very5ecret").decode()
    foreign = tmp_path / "foreign"
    MilvusIndex.build(vectors[:9], ids[:9]).save(foreign)
    (foreign / "SHA256SUMS").unlink()  # an attacker would change it, too
    described = json.loads((foreign / "index.json").read_text())

    def lies_at(uri: str) -> str:
        described["settings"]["uri"] = uri
        (foreign / "index.json").write_text(json.dumps(described))
        return uri

    def sent(message: str, connect=lambda: load_index(foreign)) -> set[str | None]:
        """Tries to open an index, which is refused with `message`; returns the tokens that were sent."""
        requests.clear()
        with pytest.raises(UserError, match=message):
            connect()
        return {token for _, token in requests}

    # An index from someone else: nothing is sent, whichever command opens it.
    uri = lies_at(f"http://127.0.0.1:{port}")
    for named in (None, "http://127.0.0.1:1", f"http://127.0.0.1:{port}1", f"http://localhost:{port}"):
        if named is not None:
            monkeypatch.setenv("MILVUS_URI", named)
        assert sent("only opens if you name it") == set()
    for name, flag in (("search", "--query=x"), ("serve", "--port=0")):
        assert command(name, f"--index={foreign}", flag) == 1
        assert f"which jaxir only opens if you name it: set MILVUS_URI={uri}" in capsys.readouterr().err
    assert requests == []
    monkeypatch.setenv("MILVUS_URI", f"{uri}/")
    assert sent("cannot be reached") == {token}
    # If an index is built in another place than MILVUS_URI names, the token is not sent there.
    elsewhere = f"http://localhost:{port}"
    refused = f"MILVUS_URI is {uri}/, where MILVUS_TOKEN is sent"
    assert sent(refused, lambda: MilvusIndex.build(vectors, ids, uri=elsewhere)) == set()
    # 0.0.0.0 is not a loopback address, although it leads to this machine.
    uri = lies_at(f"http://0.0.0.0:{port}")
    monkeypatch.setenv("MILVUS_URI", uri)
    refused = f"MILVUS_TOKEN would go to {uri} in clear text: use https://"
    assert sent(refused) == sent(refused, lambda: MilvusIndex.build(vectors, ids, uri=uri)) == set()
    monkeypatch.setenv("MILVUS_CLEARTEXT", "1")
    assert sent("cannot be reached") == {token}
    monkeypatch.delenv("MILVUS_CLEARTEXT")
    monkeypatch.delenv("MILVUS_TOKEN")
    assert sent("cannot be reached") == {None}
    # Nothing is sent to a server that does not answer with TLS.
    monkeypatch.setenv("MILVUS_TOKEN", "root:Very5ecret")
    monkeypatch.setenv("MILVUS_URI", lies_at(f"https://0.0.0.0:{port}"))
    assert sent("cannot be reached") == set()


@pytest.mark.slow
def test_commands_use_a_server(tmp_path, toy, small_model, encoder, server, capsys, monkeypatch):
    monkeypatch.setenv("MILVUS_TOKEN", "root:Very5ecret")
    monkeypatch.setenv("MILVUS_URI", server)
    texts, more_texts, queries = (toy.random_texts(count, seed=count) for count in (60, 5, 7))
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", texts)
    more = [{"_id": f"n{i}", "text": t} for i, t in enumerate(more_texts)]
    more = toy.write_jsonl(tmp_path / "more.jsonl", more)
    for name, source in (("emb", corpus), ("more", more)):
        toy.encode(small_model, source, tmp_path / name)
    flags = [f"--embeddings={tmp_path}/emb", "--backend=milvus", f"--corpus={corpus}", f"--uri={server}"]
    assert command("index", *flags, "--collection=docs", f"--output={tmp_path}/index") == 0
    assert names(server) == {"docs"}
    described = json.loads((tmp_path / "index" / "index.json").read_text())["settings"]
    assert (described["uri"], described["index_type"], described["next_row"]) == (server, "FLAT", 60)

    search = [f"--index={tmp_path}/index", f"--queries={toy.write_queries(tmp_path / 'q.jsonl', queries)}"]
    assert command("search", *search, f"--output={tmp_path}/run", "--k=9") == 0
    passages, asking = encoder.encode_passages(texts), encoder.encode_queries(queries)
    _, found = toy.nearest(passages, [f"d{i}" for i in range(60)], asking, 9)
    assert [list(answers) for answers in read_run(tmp_path / "run").values()] == found

    # A killed update left some new rows: search reports it, and the update can be run again.
    other = MilvusCollection(server, "docs")
    other.insert([np.ones([3, 32], np.float32)], 60, cosine=True)
    interrupted = load_index(tmp_path / "index")
    with pytest.raises(UserError, match="has 63 vectors and the index 60: run an interrupted update again"):
        interrupted.search(asking, 3)
    interrupted.close()
    capsys.readouterr()
    (tmp_path / "gone.txt").write_text("d1\n")
    update = [f"--update={tmp_path}/index", f"--embeddings={tmp_path}/more", f"--corpus={more}"]
    assert command("index", *update, f"--delete={tmp_path}/gone.txt") == 0
    assert "milvus index of 64 passages (5 added, 1 deleted)" in capsys.readouterr().out
    kept = [i for i in range(60) if i != 1]
    left = [f"d{i}" for i in kept] + [f"n{i}" for i in range(5)]
    vectors = np.concatenate([passages[kept], encoder.encode_passages(more_texts)])
    _, found = toy.nearest(vectors, left, asking, 64)
    updated = load_index(tmp_path / "index")
    assert updated.search(asking, 64)[1] == found
    updated.close()
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"Very5ecret" in p.read_bytes()]

    other.drop()
    assert command("search", *search, f"--output={tmp_path}/run3") == 1
    assert "has no collection docs" in capsys.readouterr().err
    other.create([np.ones([3, 7], np.float32)], "FLAT", cosine=True, mark=None)
    assert command("search", *search, f"--output={tmp_path}/run3") == 1
    assert "not row and vector of 32 dimensions" in capsys.readouterr().err
    other.close()
