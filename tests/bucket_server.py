"""A bucket: a local server with the part of Cloud Storage's JSON API that TensorStore and gcsfs use.

As in the real API, writes may be conditional, and an object appears only when it is whole.
"""

import contextlib
import email
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests import local_server

BUCKET = "bucket"
COMMANDS = """
import sys
from jaxir import cli
from jaxir.storage import leases
leases.RENEWED_EVERY, leases.STALE_AFTER = 0.5, 3.0
for name, *flags in map(str.split, sys.argv[1:]):
    print("exit status", cli.main(f"jaxir.{name}:{name}", flags))
print("tensorflow" in sys.modules)
"""


class Stored(NamedTuple):
    """An object: its content, and the number of the write that made it."""

    content: bytes
    generation: int


class Bucket:
    """The objects of one bucket.

    Attributes:
      url: where it is served.
      credentials: every Authorization header received.
      admit: returns whether the object of this name may be written; if not, the server answers 503. Runs in
          the server's thread.
    """

    def __init__(self, url: str):
        self.url = url
        self.credentials: set[str] = set()
        self.admit: Callable[[str], bool] = lambda name: True
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, tuple[str, bytearray]] = {}
        self._lock, self._writes = threading.RLock(), 0

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that uses this server instead of Google's, without credentials."""
        local = {"TENSORSTORE_GCS_HTTP_URL": self.url, "STORAGE_EMULATOR_HOST": self.url}
        nobody = {"GCE_METADATA_ROOT": self.url.removeprefix("http://"), "NO_GCE_CHECK": "true"}
        return {**os.environ, **local, **nobody}

    def names(self, prefix: str = "") -> list[str]:
        with self._lock:
            return sorted(name for name in self._objects if name.startswith(prefix))

    def written(self) -> list[str]:
        with self._lock:
            return sorted(self._objects, key=lambda name: self._objects[name].generation)

    def __getitem__(self, name: str) -> bytes:
        return self._objects[name].content

    def get(self, name: str) -> Stored | None:
        return self._objects.get(name)

    def put(self, name: str, content: bytes, condition: str | None = None) -> int:
        """Writes an object if its generation meets the condition; returns 200, 412 or 503."""
        if not self.admit(name):
            return 503
        with self._lock:
            now = self._objects[name].generation if name in self._objects else 0
            if condition is not None and int(condition) != now:
                return 412
            self._writes += 1
            self._objects[name] = Stored(bytes(content), self._writes)
            return 200

    def remove(self, name: str, condition: str | None = None) -> int:
        """Removes an object if its generation meets the condition; returns 204, 404 or 412."""
        with self._lock:
            if name in self._objects and condition not in (None, str(self._objects[name].generation)):
                return 412
            return 404 if self._objects.pop(name, None) is None else 204

    def describe(self, name: str) -> dict[str, Any]:
        """Returns the API's description of an object."""
        stored = self._objects[name]
        made = dict.fromkeys(("updated", "timeCreated"), "2026-01-01T00:00:00.000Z")
        made |= {"generation": str(stored.generation), "metageneration": "1"}
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": BUCKET,
            "size": str(len(stored.content)),
            **made,
        }

    def begin(self, name: str) -> str:
        with self._lock:
            self._uploads[key := str(len(self._uploads))] = (name, bytearray())
            return key

    def add(self, key: str, content: bytes, last: bool) -> dict[str, Any] | None:
        """Adds a part to an upload; the object appears with the last part."""
        name, parts = self._uploads[key]
        parts.extend(content)
        if not last:
            return None
        self.put(name, parts)
        return self.describe(name)


@contextlib.contextmanager
def serve() -> Iterator[Bucket]:
    """Serves an empty bucket named `BUCKET`."""
    handler = type("ThisHandler", (Handler,), {})
    with local_server.serve(handler) as address:
        handler.bucket = Bucket(address)
        yield handler.bucket


class Handler(local_server.Handler):
    bucket: Bucket

    def do_GET(self):
        path, query = self._address()
        if path == f"/storage/v1/b/{BUCKET}":
            return self._json({"kind": "storage#bucket", "name": BUCKET})
        if path == f"/storage/v1/b/{BUCKET}/o":
            return self._json(self._listing(query))
        found = re.fullmatch(rf"(/download)?/storage/v1/b/{BUCKET}/o/(.+)", path)
        name = urllib.parse.unquote(found[2]) if found else ""
        stored = self.bucket.get(name)
        if stored is None:
            return self._json({"error": {"code": 404, "message": "not found"}}, 404)
        if query.get("alt") != "media":
            return self._json(self.bucket.describe(name))
        if query.get("ifGenerationNotMatch") == str(stored.generation):
            return self._answer(304, b"")
        if query.get("ifGenerationMatch", str(stored.generation)) != str(stored.generation):
            return self._answer(412, b"")
        headers = {"x-goog-generation": str(stored.generation)}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self._answer(200, stored.content, headers)
        size = len(stored.content)
        first = int(wanted[1]) if wanted[1] else size - int(wanted[2])
        last = min(int(wanted[2]), size - 1) if wanted[1] and wanted[2] else size - 1
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return self._answer(206, stored.content[first : last + 1], headers)

    def do_POST(self):
        path, query = self._address()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/batch/storage/v1":
            return self._batch(body)
        if move := re.fullmatch(rf"/storage/v1/b/{BUCKET}/o/([^/]+)/moveTo/o/([^/]+)", path):
            source, target = map(urllib.parse.unquote, move.groups())
            if self.bucket.get(source) is None:
                return self._json({"error": {"code": 404, "message": "not found"}}, 404)
            self.bucket.put(target, self.bucket[source])
            self.bucket.remove(source)
            return self._json(self.bucket.describe(target))
        name, kind = query.get("name", ""), query.get("uploadType")
        if "upload" in query:
            return self._part(query["upload"], body)
        if kind == "resumable":
            location = f"{self.bucket.url}/upload/storage/v1/b/{BUCKET}/o?upload={self.bucket.begin(name)}"
            return self._answer(200, b"", {"Location": location})
        if kind == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\"]+)", self.headers["Content-Type"])[1].encode()
            _, head, content, _ = re.split(rb"(?:\r?\n)?--" + re.escape(boundary), body)
            head, body = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in (head, content))
            name = json.loads(head)["name"]
        code = self.bucket.put(name, body, query.get("ifGenerationMatch"))
        return self._json(self.bucket.describe(name) if code == 200 else {}, code)

    def do_DELETE(self):
        path, query = self._address()
        name = urllib.parse.unquote(path.removeprefix(f"/storage/v1/b/{BUCKET}/o/"))
        self._answer(self.bucket.remove(name, query.get("ifGenerationMatch")), b"")

    def _part(self, key: str, body: bytes) -> None:
        last, size = re.fullmatch(r"bytes \d+-(\d+)/(\d+|\*)", self.headers["Content-Range"]).groups()
        described = self.bucket.add(key, body, last=size != "*" and int(last) + 1 == int(size))
        if described is None:
            return self._answer(308, b"", {"Range": f"bytes=0-{last}"})
        return self._json(described)

    def _batch(self, body: bytes) -> None:
        whole = email.message_from_bytes(f"Content-Type: {self.headers['Content-Type']}\n\n".encode() + body)
        answers = []
        for part in whole.get_payload():
            name = re.match(rf"DELETE /storage/v1/b/{BUCKET}/o/(\S+)", part.get_payload())[1]
            code = self.bucket.remove(urllib.parse.unquote(name))
            answers.append(f"--answers\nContent-Type: application/http\n\nHTTP/1.1 {code} .\n\n")
        content = "".join(answers).encode() + b"--answers--"
        self._answer(200, content, {"Content-Type": "multipart/mixed; boundary=answers"})

    def _listing(self, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        low, high = query.get("startOffset", ""), query.get("endOffset", "")
        items, prefixes = [], {}
        for name in self.bucket.names(prefix):
            if name < low or (high and name >= high):
                continue
            inner, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if found:
                prefixes[prefix + inner + delimiter] = None
            else:
                with contextlib.suppress(KeyError):  # another request removed the object
                    items.append(self.bucket.describe(name))
        return {"kind": "storage#objects", "items": items, "prefixes": list(prefixes)}

    def _address(self) -> tuple[str, dict[str, str]]:
        if "Authorization" in self.headers:
            self.bucket.credentials.add(self.headers["Authorization"])
        url = urllib.parse.urlsplit(self.path)
        return url.path, dict(urllib.parse.parse_qsl(url.query))

    def _json(self, content: dict[str, Any], status: int = 200) -> None:
        self._answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass
