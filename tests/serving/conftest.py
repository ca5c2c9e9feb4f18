"""Indexes of a toy model, and `python -m jaxir.serve` over them."""

import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from jaxir.sidecar import environment
from tests.retrieval import conftest as retrieval_texts

TESTS = Path(__file__).resolve().parent.parent
XSS = "<script>document.title = 'owned'</script>"
SPECIAL_ID = "./a/../b//é?#%2F&c"
DOCUMENTS = [
    {"_id": "cats", "title": "Joining arrays", "text": "w1 w2 w3 the array that was joined w4"},
    {
        "_id": "xss",
        "title": XSS,
        "text": "w1 w5 <img src=x onerror=\"document.title = 'owned'\"> joins"
        + " filler" * 60
        + " w199 <b>end</b>",
        "metadata": {"author": "<i>Ada</i>", "pages": [7, 8], "nothing": None},
    },
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
        """Returns (status, headers, body) of one request on a connection of its own."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        with contextlib.closing(connection):
            if body is not None and not isinstance(body, bytes):
                body, headers = json.dumps(body).encode(), {"content-type": "application/json", **headers}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def ask(self, path: str, **body) -> dict:
        """Returns the answer to a request that must be answered."""
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
def toy() -> types.ModuleType:
    """The toy model of tests/retrieval and its texts."""
    return retrieval_texts


@pytest.fixture(scope="session")
def bench() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("serve", TESTS.parent / "benchmarks" / "serve.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def world(tmp_path_factory, toy) -> types.SimpleNamespace:
    """A model, a dense index and another one: Lucene's where it can be had, else a second dense one."""
    from jaxir import DualEncoder, ExactIndex
    from jaxir.retrieval.indexes.lucene_index import build_lucene_index

    root = tmp_path_factory.mktemp("serving")
    model = toy.save_model(root / "model", seed=0)
    records = DOCUMENTS + [
        {"_id": f"d{i}", "title": f"Title {i}", "text": t} for i, t in enumerate(toy.random_texts(60, seed=4))
    ]
    corpus = toy.write_jsonl(root / "corpus.jsonl", records)
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
        ExactIndex.build(np.ascontiguousarray(vectors[::-1]), ids, **facts).save(
            root / "second", corpus=corpus
        )
    return types.SimpleNamespace(
        root=root,
        model=model,
        encoder=encoder,
        ids=ids,
        documents={r["_id"]: r for r in records},
        special_id=SPECIAL_ID,
        second_kind="sparse" if has_lucene else "dense",
    )


@pytest.fixture(scope="session")
def gin_file(tmp_path_factory) -> str:
    """Limits that tests need not wait for."""
    path = tmp_path_factory.mktemp("gin") / "limits.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\n"
        "from jaxir import serve\n"
        "from jaxir.serving import limits\n"
        "serve.serve.limits = @limits.Limits()\n"
        "limits.Limits.head_seconds = 1.0\n"
        "limits.Limits.body_seconds = 1.0\n"
        "limits.Limits.read_seconds = 1.0\n"
        "limits.Limits.body_bytes = 200_000\n"
        "limits.Limits.whole_characters = 30_000\n"
    )
    return str(path)


@pytest.fixture(scope="session")
def start_over():
    """Starts a server over other indexes: `with start_over(directory, "--index=DIR") as server`."""
    return running


@pytest.fixture(scope="session")
def start(world, gin_file):
    """Starts a server over both indexes: `with start(directory) as server`."""

    def start_server(directory: Path):
        indexes = [f"--index={world.root}/dense", f"--index=second={world.root}/second"]
        return running(directory, *indexes, f"--gin_file={gin_file}")

    return start_server


@pytest.fixture(scope="session")
def served(tmp_path_factory, start) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("log")) as server:
        yield server
        assert server.process.poll() is None
        assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="session")
def without_texts(tmp_path_factory, world) -> Iterator[Server]:
    """A server of an index that was built without a corpus, at 127.0.0.2, and its access.log."""
    directory = tmp_path_factory.mktemp("without_texts")
    flags = [f"--index={world.root}/without_texts", f"--access_log={directory}/access.log"]
    flags.append("--host=127.0.0.2")
    with running(directory, *flags) as server:
        yield server
    assert re.fullmatch("loading .*\n", server.log.read_text())
