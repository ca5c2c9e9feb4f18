"""gs:// through TensorStore's own driver, against a local server that speaks Cloud Storage's protocol."""

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest

from jaxir.interop import model_dir

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
COMMANDS = """
import sys
from jaxir import cli
for name, *flags in map(str.split, sys.argv[1:]):
    print(cli.main(f"jaxir.{name}:{name}", flags))
"""


class Bucket(http.server.BaseHTTPRequestHandler):
    """Objects in a dict: read, write and list, as the JSON API has them."""

    objects: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        name = urllib.parse.unquote(url.path.removeprefix("/storage/v1/b/bucket/o").removeprefix("/"))
        if url.path == "/storage/v1/b/bucket/o":
            found = sorted(n for n in self.objects if n.startswith(query.get("prefix", "")))
            items = [{"name": n, "generation": "1", "size": str(len(self.objects[n]))} for n in found]
            self._answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode())
        elif name in self.objects:
            self._answer(200, self.objects[name])
        else:
            self._answer(404, b"{}")

    def do_POST(self):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        self.objects[query["name"]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, json.dumps({"name": query["name"], "generation": "1"}).encode())

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("x-goog-generation", "1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def bucket():
    handler = type("ThisBucket", (Bucket,), {"objects": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler.objects, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_bucket_is_written_and_read(bucket, tmp_path):
    objects, url = bucket
    run, tokenizer = "gs://bucket/models/run", f"--tokenizer={GOLDEN / 't5_1_1'}"
    export = f"export --model=st:{GOLDEN / 't5_1_1'} --format=t5x --output={run}"
    environment = os.environ | {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GCE_METADATA_ROOT": url.removeprefix("http://"),
    }
    commands = [
        export,
        f"convert --source=t5x:{run} --output={tmp_path}/newest {tokenizer}",
        f"convert --source=t5x:{run}/checkpoint_0/ --output={tmp_path}/named {tokenizer}",
        f"convert --source=t5x:gs://bucket/models/other --output={tmp_path}/other {tokenizer}",
        f"convert --source=t5x:{run} --output={tmp_path}/none",
        export,
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *commands],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    codes = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert codes == ["0", "0", "0", "1", "1", "1"], done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: gs://bucket/models/other: no T5X checkpoint in it")
    assert errors[1].startswith(f"error: {run}/checkpoint_0: a T5X checkpoint has no tokenizer")
    assert errors[2].startswith(f"error: {run} already exists")
    expected = model_dir.load(f"st:{GOLDEN / 't5_1_1'}").fingerprint
    for name in ("newest", "named"):
        assert model_dir.load(f"{tmp_path}/{name}").fingerprint == expected
    names = set(objects)
    assert "models/run/checkpoint_0/checkpoint" in names
    assert "models/run/checkpoint_0/target.encoder.layers_0.mlp.wo.kernel/.zarray" in names
    assert b"t5x-dummy-bucket" in objects["models/run/checkpoint_0/checkpoint"]
    assert list(objects)[-1] == "models/run/checkpoint_0/checkpoint", "the index is written last"
