"""A stand-in for the server of Weights & Biases, which keeps the rows of one run.

It answers the requests that wandb 0.31 makes for a run; the real server's answers have more fields.
"""

import contextlib
import gzip
import json
from collections.abc import Iterator
from typing import Any

from tests.local_server import Handler, serve


class StoredRun:
    """A run on the server: `rows` and `summary`, as JSON texts; `resumed` is the number of resumes."""

    def __init__(self):
        self.rows: list[str] = []
        self.url, self.summary, self.made, self.resumed = "", "{}", False, 0

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Returns the data of the answer to a GraphQL request."""
        project = {"id": "project", "name": "jaxir", "entity": {"id": "entity", "name": "me"}}
        run = {"id": "run", "name": variables.get("name"), "displayName": "run", "config": "{}"}
        if "RunResumeStatus" in query:
            if not self.made:
                return {"model": None}
            self.resumed += 1
            counts = {"historyLineCount": len(self.rows), "eventsLineCount": 0, "logLineCount": 0}
            tails = {"historyTail": json.dumps(self.rows[-1:]), "eventsTail": "[]", "tags": []}
            begun = {"wandbConfig": '{"t": {"1": [1]}}', "summaryMetrics": self.summary}
            return {"model": project | {"bucket": run | counts | tails | begun}}
        if "upsertBucket" in query:
            inserted, self.made = not self.made, True
            return {"upsertBucket": {"bucket": run | {"project": project}, "inserted": inserted}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/file"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "user", "entity": "me", "username": "me", "flags": "{}"}}

    def keep(self, files: dict[str, Any]) -> None:
        """Stores the lines of a file stream."""
        if history := files.get("wandb-history.jsonl"):
            self.rows[history["offset"] :] = history["content"]
        if summary := files.get("wandb-summary.json"):
            self.summary = summary["content"][-1]


@contextlib.contextmanager
def serving() -> Iterator[StoredRun]:
    stored = StoredRun()

    class Requests(Handler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            if self.headers["content-encoding"] == "gzip":
                body = gzip.decompress(body)
            reply: dict[str, Any] = {}
            if self.path.endswith("/graphql"):
                asked = json.loads(body)
                reply = {"data": stored.answer(asked["query"], asked.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                stored.keep(json.loads(body).get("files") or {})
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_POST

        def log_message(self, *message):
            pass

    with serve(Requests) as stored.url:
        yield stored
