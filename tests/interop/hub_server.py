"""A local server with the part of the Hugging Face hub's protocol that its client library uses.

A repository maps paths to bytes; the name of a data set begins with `datasets/`. Files of 1,000 bytes and
more count as large: the hub stores their SHA-256 and redirects to another host. For small files it stores
git's hash.
"""

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import local_server

LARGE = 1000


class Request(NamedTuple):
    """A request for a model."""

    method: str
    path: str


class Hub:
    """Repositories, and the requests for them."""

    def __init__(self, url: str):
        self.url = url
        self.asked: list[Request] = []  # every request for a model
        self.sent: list[tuple[str, int]] = []  # path and first byte of every sent file
        self.tokens: dict[str, set[str]] = {}  # Authorization headers by the requested host
        self.refusals: dict[str, tuple[int, str]] = {}  # status and X-Error-Code by the name of a repository
        # (path, bytes of an answer) -> the bytes sent before the connection is cut; None for all.
        self.sends: Callable[[str, int], int | None] = lambda path, size: None
        self._repositories: dict[tuple[str, str], dict[str, bytes]] = {}
        self._refs: dict[tuple[str, str], str] = {}
        self.created: dict[str, bool] = {}  # whether each repository that a client created is private

    def add(self, name: str, files: dict[str, bytes], *more: str) -> str:
        """Makes a commit and returns its hash, as branch main or the given revisions."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self._repositories[name, commit] = files
        for revision in (commit, *(more or ("main",))):
            self._refs[name, revision] = commit
        return commit

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
        return {**plain, "HF_ENDPOINT": self.url, "HF_HOME": str(cache), **more}

    def commit(self, name: str, revision: str) -> str | None:
        return self._refs.get((name, revision))

    def has(self, name: str) -> bool:
        return any(n == name for n, _ in self._refs)

    def files(self, name: str, commit: str) -> dict[str, bytes]:
        return self._repositories[name, commit]


@functools.cache
def etag(content: bytes) -> str:
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _about(content: bytes, name: str) -> dict[str, Any]:
    """Returns a file's entry in a listing; `name` is the key of its hash."""
    if len(content) < LARGE:
        return {"size": len(content), name: etag(content)}
    git = hashlib.sha1(b"a pointer to " + content).hexdigest()
    lfs = {"sha256": etag(content), "oid": etag(content), "size": len(content), "pointerSize": 134}
    return {"size": len(content), name: git, "lfs": lfs}


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    handler = type("ThisHandler", (Handler,), {})
    with local_server.serve(handler) as address:
        handler.hub = Hub(address)
        yield handler.hub


class Handler(local_server.Handler):
    """One connection."""

    hub: Hub

    def do_HEAD(self):
        self._resolve()

    def do_GET(self):
        path = urllib.parse.urlsplit(self.path).path
        if stored := re.fullmatch(r"/stored/([0-9a-f]{40})/(.+?/.+?)/(.+)", urllib.parse.unquote(path)):
            self._token()
            return self._send(self.hub.files(stored[2], stored[1])[stored[3]], {}, stored[3])
        found = re.fullmatch(r"/api/(models|datasets)/(.+?)/(revision|tree)/(.+)", path)
        if not found:
            return self._resolve()
        self._note()
        prefix, revision = "datasets/" if found[1] == "datasets" else "", urllib.parse.unquote(found[4])
        name = prefix + found[2]
        commit = self._commit(name, revision)
        if commit is None:
            return None
        files = self.hub.files(name, commit).items()
        if found[3] == "tree":
            return self._json([{"type": "file", "path": f, **_about(c, "oid")} for f, c in files])
        about = {"_id": "1", "id": found[2], "sha": commit, "private": False, "tags": [], "downloads": 0}
        return self._json(about | {"siblings": [{"rfilename": f, **_about(c, "blobId")} for f, c in files]})

    def do_POST(self):
        """Creates a repository, or makes a commit of files that a client sends. All files count as small."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = urllib.parse.urlsplit(self.path).path
        self._token()
        if "Authorization" not in self.headers:
            return self._refuse(401, "")
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            about = json.loads(content)
            name = f"{about['organization']}/{about['name']}"
            if self.hub.has(name):
                return self._refuse(409, "")
            self.hub.created[name] = about.get("visibility") == "private"
            self.hub.add(name, {".gitattributes": b""})
            return self._json({"url": f"{self.hub.url}/{name}", "name": name})
        found = re.fullmatch(r"/api/models/(.+?)/(preupload|commit)/main", path)
        if not found:
            return self._refuse(404, "")
        if found[2] == "preupload":
            small = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **small} for file in json.loads(content)["files"]]
            return self._json({"files": files})
        lines = [json.loads(line) for line in content.splitlines()]
        sent = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        before = self.hub.files(found[1], self.hub.commit(found[1], "main"))
        commit = self.hub.add(found[1], before | sent)
        url = f"{self.hub.url}/{found[1]}"
        return self._json({"success": True, "commitOid": commit, "commitUrl": f"{url}/commit/{commit}"})

    def _resolve(self) -> None:
        self._note()
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        found = re.fullmatch(r"/(.+?)/resolve/([0-9a-f]{40}|main)/(.+)", path)
        commit = self._commit(found[1], found[2]) if found else self._refuse(404, "RepoNotFound")
        if commit is None:
            return None
        content = self.hub.files(found[1], commit).get(found[3])
        if content is None:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit}
        if len(content) >= LARGE:
            elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
            headers["Location"] = f"{elsewhere}/stored/{commit}/{found[1]}/{found[3]}"
            headers |= {"X-Linked-ETag": f'"{etag(content)}"', "X-Linked-Size": str(len(content))}
            return self._answer(302, b"", headers)
        return self._send(content, headers | {"ETag": f'"{etag(content)}"'}, found[3])

    def _send(self, content: bytes, headers: dict[str, str], path: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, size, first = 200, len(content), 0
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            status, content = 206, content[first : last + 1]
        if self.command == "GET":
            self.hub.sent.append((path, first))
        self._answer(status, content, headers | {"Accept-Ranges": "bytes"}, path=path)

    def _token(self) -> None:
        host = self.headers["Host"].partition(":")[0]
        self.hub.tokens.setdefault(host, set()).add(self.headers.get("Authorization", ""))

    def _note(self) -> None:
        if self.path.startswith("/api/") and not self.path.startswith(("/api/models/", "/api/datasets/")):
            return  # an unrelated request of the client library
        self._token()
        self.hub.asked.append(Request(self.command, urllib.parse.unquote(self.path.partition("?")[0])))

    def _commit(self, name: str, revision: str) -> str | None:
        if name in self.hub.refusals:
            return self._refuse(*self.hub.refusals[name])
        if not self.hub.has(name):  # the hub gives clients without a token 401, not 404
            return self._refuse(401 if "Authorization" not in self.headers else 404, "RepoNotFound")
        return self.hub.commit(name, revision) or self._refuse(404, "RevisionNotFound")

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code} | (headers or {}))

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str], *, path: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            sent = self.hub.sends(path, len(content)) if path else None
            self.wfile.write(content[:sent])
            if sent is not None and sent < len(content):
                self.wfile.flush()
                self.close_connection = True

    def log_message(self, *args):
        pass
