"""Indexes of a toy model, and `python -m jaxir.serve` over them."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from jaxir.serving.app import build_app
from jaxir.serving.metrics import Metrics
from jaxir.sidecar import environment
from tests.retrieval.conftest import random_texts, save_model, write_jsonl

XSS = "<script>document.title = 'owned'</script>"
IMAGE = "w1 w5 <img src=x onerror=\"document.title = 'owned'\"> joins"
SPECIAL_ID = "./a/../b//é?#%2F&c"
DOCUMENTS = [
    {"_id": "cats", "title": "Joining arrays", "text": "w1 w2 w3 the array that was joined w4"},
    {"_id": "xss", "title": XSS, "text": IMAGE + " filler" * 60 + " w199 <b>end</b>"}
    | {"metadata": {"author": "<i>Ada</i>", "pages": [7, 8], "nothing": None}},
    {"_id": "plain", "title": "", "text": "w7 w8 𝒳🙂 arrays w9"},
    {"_id": SPECIAL_ID, "title": "", "text": "w11"},
]


@dataclasses.dataclass
class Server:
    """A server process under test."""

    process: subprocess.Popen
    url: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        return urlsplit(self.url).hostname, urlsplit(self.url).port

    def request(self, method: str, path: str, body=None, **headers: str) -> tuple[int, dict, bytes]:
        """Returns (status, headers, body) of a request on its own connection."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        with contextlib.closing(connection):
            if body is not None and not isinstance(body, bytes):
                body, headers = json.dumps(body).encode(), {"content-type": "application/json", **headers}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def ask(self, path: str, **body) -> dict:
        status, _, content = self.request("POST", path, body)
        assert status == 200, content
        return json.loads(content)


@contextlib.contextmanager
def running(directory: Path, *flags: str) -> Iterator[Server]:
    log = directory / "serve.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxir.serve", "--port=0", *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONWARNINGS": "default"},
        )
    with process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving on http://127.0.0."), log.read_text()
            yield Server(process, line.split()[-1], log)
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> types.SimpleNamespace:
    """A model, a dense index, and a second index: Lucene's if available, else dense."""
    from jaxir import DualEncoder, ExactIndex
    from jaxir.retrieval.indexes.lucene_index import build_lucene_index

    root = tmp_path_factory.mktemp("serving")
    model = save_model(root / "model", seed=0)
    records = DOCUMENTS + [
        {"_id": f"d{i}", "title": f"Title {i}", "text": t} for i, t in enumerate(random_texts(60, seed=4))
    ]
    corpus = write_jsonl(root / "corpus.jsonl", records)
    encoder = DualEncoder.load(model)
    vectors = encoder.encode_passages([f"{r['title']} {r['text']}".strip() for r in records])
    ids = [r["_id"] for r in records]
    facts = {"similarity": "cosine", "fingerprint": encoder.fingerprint, "model": model}
    ExactIndex.build(vectors, ids, **facts).save(root / "dense", corpus=corpus)
    ExactIndex.build(vectors, ids, **facts).save(root / "without_texts")
    has_lucene = environment.installed() is not None
    if has_lucene:
        build_lucene_index(corpus, root / "second")
    else:
        turned = np.ascontiguousarray(vectors[::-1])
        ExactIndex.build(turned, ids, **facts).save(root / "second", corpus=corpus)
    return types.SimpleNamespace(
        root=root,
        model=model,
        encoder=encoder,
        ids=ids,
        documents={r["_id"]: r for r in records},
        special_id=SPECIAL_ID,
        second_kind="sparse" if has_lucene else "dense",
    )


def write_limits(path: Path, **limits: float) -> str:
    head = ["from __gin__ import dynamic_registration", "from jaxir import serve"]
    head += ["from jaxir.serving import limits", "serve.serve.limits = @limits.Limits()"]
    path.write_text(
        "\n".join([*head, *(f"limits.Limits.{name} = {value}" for name, value in limits.items())])
    )
    return f"--gin_file={path}"


def result_of(service: Any, coroutine_of: Callable[[Any], Any]) -> Any:
    """Returns the result of a coroutine while the service is open."""

    async def inside():
        async with service as running:
            return await coroutine_of(running)

    return asyncio.run(inside())


@pytest.fixture(scope="session")
def both_indexes(world) -> list[str]:
    return [f"--index={world.root}/dense", f"--index=second={world.root}/second"]


@pytest.fixture(scope="session")
def served(tmp_path_factory, both_indexes) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    limits = write_limits(directory / "limits.gin", body_bytes=200_000, whole_characters=30_000)
    with running(directory, *both_indexes, limits) as server:
        yield server
        assert server.process.poll() is None
        assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="session")
def without_texts(tmp_path_factory, world) -> Iterator[Server]:
    """A server at 127.0.0.2 of an index without a corpus, and its access.log."""
    directory = tmp_path_factory.mktemp("without_texts")
    flags = [f"--index={world.root}/without_texts", f"--access_log={directory}/access.log"]
    flags.append("--host=127.0.0.2")
    with running(directory, *flags) as server:
        yield server
    assert re.fullmatch("loading .*\n", server.log.read_text())


def answered(service, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
    """Returns status and answer of a request to the application."""
    app, sent = build_app(service, Metrics(service)), []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    async def ask(_):
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        with contextlib.suppress(RuntimeError):  # uvicorn would print the error
            await app(scope, receive, send)

    result_of(service, ask)
    return sent[0]["status"], json.loads(b"".join(part["body"] for part in sent[1:]))
